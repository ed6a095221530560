"""Removes values of gauges."""

from attention_serving.server.observe.prometheus import forget

__all__ = ["forget"]
