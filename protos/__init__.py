"""The wire contracts, and the Python code generated from them by `python -m protos.generate`."""
