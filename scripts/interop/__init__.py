"""KServe's SDK, in an environment of its own, against a live server: `make interop`."""
