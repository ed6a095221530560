"""Traces, exported with OpenTelemetry's protocol. Nothing of OpenTelemetry is imported unless they are on.

options.py    whether and where spans are exported: the settings and OpenTelemetry's variables
context.py    W3C Trace Context in and out, and the decision to sample, once for each call
spans.py      spans from the records of gRPC calls; http_spans.py: from those of HTTP requests
messages.py   the parts of OTLP messages that spans share
export.py     the batch processor, its thread and its end

The calls' thread notes moments in a record (`server.records`), and makes the spans of several calls that
have ended in one go: handing each record to another thread costs more. The exporter's thread sends them.
"""
