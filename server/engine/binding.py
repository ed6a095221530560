"""Runs a session whose device is not the host: inputs and outputs are bound to page-locked memory.

The outputs of a run are written where they are read: into memory that the caller's arrays refer to. Both
copies, to the device and back, are part of the run. While one run copies, others compute.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import DTypeLike
from onnxruntime.capi import onnxruntime_pybind11_state as native

from attention_serving.server.engine.pinned import HostMemory
from attention_serving.server.engine.types import Array

HOST = native.OrtDevice(native.OrtDevice.cpu(), native.OrtDevice.default_memory(), 0)
# Types of tensors by their names in ONNX Runtime.
DATA_TYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(double)": np.dtype(np.float64),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(bool)": np.dtype(np.bool_),
}


class UnboundOutputError(Exception):
    """An output cannot be bound: its type is unknown, or its shape does not follow from the inputs."""


class BoundSession:
    """A session with bound inputs and outputs. Each run has values of its own, so that several may go on."""

    def __init__(self, session: onnxruntime.InferenceSession, memory: HostMemory) -> None:
        """Binds nothing yet.

        Args:
            session: The session.
            memory: Makes the arrays of the outputs.

        Raises:
            UnboundOutputError: An output cannot be bound.
        """
        self._session = session
        self._memory = memory
        self._inputs: dict[str, list[Any]] = {each.name: each.shape for each in session.get_inputs()}
        self._outputs: dict[str, tuple[list[Any], np.dtype[Any]]] = {}
        known = {axis for shape in self._inputs.values() for axis in shape if isinstance(axis, str)}
        for each in session.get_outputs():
            data_type: Any = DATA_TYPES.get(each.type)
            if data_type is None or not all(isinstance(axis, int) or axis in known for axis in each.shape):
                raise UnboundOutputError(f"output {each.name} {each.shape}")
            self._outputs[each.name] = each.shape, data_type

    def empty(self, shape: Sequence[int], data_type: DTypeLike) -> Array:
        """An array for an input, whose values are undefined. Other arrays are copied more slowly."""
        return self._memory.empty(shape, data_type)

    def run(
        self, inputs: dict[str, Array], options: onnxruntime.RunOptions | None = None
    ) -> dict[str, Array]:
        """Runs the graph.

        Args:
            inputs: Arrays by name.
            options: Options of the run.

        Returns:
            Output arrays by name. Their memory is used again once nothing refers to them.

        Raises:
            ValueError: An input is missing.
        """
        if missing := [name for name in self._inputs if name not in inputs]:
            raise ValueError(f"inputs {missing} are missing")
        # The runtime reads the arrays' own memory, and these variables keep it.
        arrays = {name: np.asarray(array, order="C") for name, array in inputs.items()}
        sizes = self._sizes(arrays)
        outputs = {
            # An axis that an input lacks has no size here. The runtime refuses such an input.
            name: self._memory.empty(
                [axis if isinstance(axis, int) else sizes.get(axis, 0) for axis in shape], data_type
            )
            for name, (shape, data_type) in self._outputs.items()
        }
        self._session.run_with_ortvaluevector(
            options or onnxruntime.RunOptions(),
            list(arrays),
            _values(arrays),
            list(outputs),
            _values(outputs),
            [HOST] * len(outputs),
        )
        return outputs

    def _sizes(self, arrays: dict[str, Array]) -> dict[str, int]:
        """The sizes of the symbolic axes."""
        return {
            axis: size
            for name, shape in self._inputs.items()
            for axis, size in zip(shape, arrays[name].shape, strict=False)
            if isinstance(axis, str)
        }


def _values(arrays: dict[str, Array]) -> Any:
    """The runtime's values that share the memory of arrays."""
    values = native.OrtValueVector()
    for array in arrays.values():
        values.push_back(native.OrtValue.ortvalue_from_numpy(array, HOST))
    return values
