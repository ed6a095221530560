"""Judges running servers by sentence-transformers on this machine, and by golden vectors: `attention-client prove`."""
