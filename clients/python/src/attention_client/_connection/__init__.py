"""The connection: its settings, its channels, and how each client makes calls on them."""
