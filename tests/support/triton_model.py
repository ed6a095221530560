"""A model of Triton's Python backend that runs the graph of a configuration as the ONNX Runtime backend does.

Triton loads this file in its own environment. A request's batch axis is joined with those of the others.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton  # type: ignore[import-not-found]  # brought by Triton


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        graph = config["parameters"]["graph"]["string_value"]
        path = Path(args["model_repository"]) / args["model_version"] / graph
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.inputs = [each["name"] for each in config["input"]]
        self.outputs = [each["name"] for each in config["output"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        columns = {name: [self.array(request, name) for request in requests] for name in self.inputs}
        feed = {name: np.concatenate(arrays) for name, arrays in columns.items()}
        ends = np.cumsum([len(array) for array in columns[self.inputs[0]]])[:-1]
        outputs = self.session.run(self.outputs, feed)
        parts = [np.split(output, ends) for output in outputs]
        return [
            triton.InferenceResponse(list(map(triton.Tensor, self.outputs, own)))
            for own in zip(*parts, strict=True)
        ]

    @staticmethod
    def array(request: Any, name: str) -> Any:
        return triton.get_input_tensor_by_name(request, name).as_numpy()
