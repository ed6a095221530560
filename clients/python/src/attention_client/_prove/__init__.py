"""Judges running servers by sentence-transformers, or by golden vectors: `attention-client prove`."""
