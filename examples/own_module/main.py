"""Exports a module of this folder's model.py, serves it in this process, and compares answers with PyTorch.

    python examples/own_module/main.py

Needs `attention-serving[cpu,export]`. The folder can be anywhere, and its files can have any names.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from attention_serving.export import export_module
from attention_serving.server.engine.in_process import InProcessModel
from model import Reader

LENGTHS = (6, 1, 40)


def main() -> int:
    """Runs the example and returns the exit status."""
    torch.manual_seed(0)
    module = Reader().eval()
    rng = np.random.default_rng(0)
    sequences = [rng.standard_normal((length, 32), dtype=np.float32) for length in LENGTHS]
    with tempfile.TemporaryDirectory() as repository:
        example, axes = {"x": torch.zeros(2, 3, 32)}, {"x": {0: "batch", 1: "sequence"}}
        export_module(module, example, axes, out=repository, name="reader")
        served = InProcessModel.load(Path(repository), "reader")
        (answers,) = served.submit({"x": sequences}).result().outputs.values()
        served.close()
    with torch.inference_mode():
        eager = [module(torch.from_numpy(sequence)[None])[0].numpy() for sequence in sequences]
    difference = max(float(np.abs(a - b).max()) for a, b in zip(answers, eager, strict=True))
    print(f"{len(answers)} answers; largest difference from eager PyTorch: {difference:.1e}")
    return 0 if difference < 1e-5 else 1  # noqa: PLR2004 - the tolerance of the export


if __name__ == "__main__":
    sys.exit(main())
