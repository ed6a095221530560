"""attention.v1, the typed API: its service and its codec."""
