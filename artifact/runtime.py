"""Optimisers of ONNX Runtime that may end the process that opens a graph."""

from pathlib import Path


def unsafe_optimizers(graph: Path) -> list[str]:
    """The optimisers without which every graph opens, as the argument `disabled_optimizers` of a session.

    If a graph computes in half precision, MatmulTransposeFusion may leave a node without its operator behind,
    and NchwcTransformer reads it: github.com/microsoft/onnxruntime/issues/28392. NchwcTransformer changes
    nothing but convolutions, which take up to seven times as long without it. Graphs with convolutions do
    without the other one, which saves up to a sixth of a run of attention in half precision.
    """
    has_convolutions = b"Conv" in graph.read_bytes()
    return ["MatmulTransposeFusion" if has_convolutions else "NchwcTransformer"]
