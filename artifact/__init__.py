"""What lies on disk: manifest, golden vectors, tolerance.

Written by export/; read by export/, server/ and clients/enrich/. Imports neither PyTorch nor ONNX Runtime.
"""
