"""From a PyTorch module to an artifact: ONNX graphs, manifest, golden vectors and parity report.

`export.manifest` reads artifacts without PyTorch; everything else here writes them.
"""
