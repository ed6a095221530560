"""Measures the service beside its ceilings and other servers: `python -m benchmarks --help`."""
