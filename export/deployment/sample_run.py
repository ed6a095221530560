"""Runs model.onnx on its golden vectors and compares the results with those in them.

Needs NumPy and ONNX Runtime only: pip install numpy onnxruntime; python run.py
"""

from pathlib import Path

import numpy as np
import onnxruntime

folder = Path(__file__).resolve().parent
# This optimiser may crash on graphs that compute in half precision, and speeds up convolutions only:
# github.com/microsoft/onnxruntime/issues/28392.
session = onnxruntime.InferenceSession(
    str(folder / "model.onnx"),
    providers=["CPUExecutionProvider"],
    disabled_optimizers=["NchwcTransformer"],
)
about = session.get_modelmeta().custom_metadata_map
golden = np.load(folder / "golden.npz")
for case in sorted({name.split("/")[0] for name in golden}):
    inputs = {node.name: golden[f"{case}/inputs/{node.name}"] for node in session.get_inputs()}
    for output, value in zip(session.get_outputs(), session.run(None, inputs), strict=True):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in inputs.items())
        eager = golden[f"{case}/outputs/{output.name}"]
        np.testing.assert_allclose(value, eager, rtol=float(about["rtol"]), atol=float(about["atol"]))
        print(f"{shapes} -> {output.name} {value.shape}: equal to PyTorch")
