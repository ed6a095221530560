"""The Open Inference Protocol: its handlers and its codec."""
