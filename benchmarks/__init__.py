"""Measures the service beside its ceilings and its peers, in one run: `python -m benchmarks run`."""
