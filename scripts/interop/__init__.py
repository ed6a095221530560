"""Clients of other projects, each in an environment of its own, against a live server: `make interop`."""
