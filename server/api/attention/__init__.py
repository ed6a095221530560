"""attention.v1, the typed API: its handlers and its codec."""
