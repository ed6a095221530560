"""The Open Inference Protocol: its requests, responses and handlers."""
