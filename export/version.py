"""The version of the exporter, in a file of its own because the package's imports need it."""

VERSION = "0.1.0"
