"""Proves and measures the service on one NVIDIA GPU: `python -m benchmarks.cuda --help`."""
