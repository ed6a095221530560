"""The version of the exporter, which artifacts state."""

VERSION = "0.1.0"
