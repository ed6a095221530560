"""The model of Triton's Python backend: ONNX Runtime on all cores. Triton loads it in its own environment."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton  # type: ignore[import-not-found]  # brought by Triton


class TritonPythonModel:
    """Runs the requests of a dynamic batch, which have equal shapes, as one batch."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the graph `model.onnx` beside this file."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = len(os.sched_getaffinity(0))
        graph = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._inputs = [one.name for one in self._session.get_inputs()]
        self._output = self._session.get_outputs()[0].name

    def execute(self, requests: list[Any]) -> list[Any]:
        """Returns one response for each request."""
        columns = {name: [_array(request, name) for request in requests] for name in self._inputs}
        sizes = [len(array) for array in columns[self._inputs[0]]]
        batch = {name: np.concatenate(arrays) for name, arrays in columns.items()}
        output = self._session.run([self._output], batch)[0]
        parts = np.split(output, np.cumsum(sizes)[:-1])
        return [triton.InferenceResponse([triton.Tensor(self._output, part)]) for part in parts]


def _array(request: Any, name: str) -> Any:
    return triton.get_input_tensor_by_name(request, name).as_numpy()
