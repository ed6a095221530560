"""Generated from attention/v1/attention.proto; nothing here is written by hand."""
