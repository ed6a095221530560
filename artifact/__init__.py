"""The files of an artifact: manifest, golden vectors, tolerance, certificate.

export/ writes them; export/, server/ and clients/enrich/ read them. Imports neither PyTorch nor ONNX Runtime.
"""
