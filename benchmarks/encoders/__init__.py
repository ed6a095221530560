"""Text encoders beside sentence-transformers and padded ONNX Runtime: `python -m benchmarks.encoders`."""
