"""Several server processes on one port, and the supervisor that starts, replaces and drains them."""
