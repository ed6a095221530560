"""The Open Inference Protocol: its service and its codec."""
