"""attention.v1, the typed API: its requests, responses and handlers."""
