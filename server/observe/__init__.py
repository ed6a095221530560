"""What a server tells about itself: metrics, traces, and the log.

metrics.py     every metric, and where its values come from
prometheus.py  the endpoint for Prometheus, and what its client library lacks
records.py     what is noted of a call over gRPC; request ids, and what callers say of their traces
logs.py        the form of the log, the thread that writes it, and the lines of requests
traces.py      spans; the only file that imports OpenTelemetry, and it is imported if traces are on
"""
