"""The kit for a machine with an NVIDIA GPU: what is asked of it, in steps."""
