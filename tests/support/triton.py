"""Sends requests with an unmodified tritonclient, from another process.

tritonclient and protos/ both define the package `inference`, and protobuf allows one such definition
in a process.
"""

import atexit
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class TritonError(Exception):
    """tritonclient raised InferenceServerException; carries its status and message."""


def infer(
    target: str,
    model: str,
    inputs: Mapping[str, Array],
    outputs: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
) -> dict[str, Array]:
    """Returns the outputs by name: the given ones, or else those that the server sends by default."""
    given = dict(inputs), list(outputs), dict(parameters or {})
    answer: dict[str, Array] = in_another_process(_infer, target, model, *given)
    return answer


def in_another_process(function: Any, *arguments: Any, **options: Any) -> Any:
    """Calls a function where tritonclient can be imported, and returns what it returns."""
    return _process().submit(function, *arguments, **options).result(timeout=120)


@cache
def _process() -> ProcessPoolExecutor:
    """The one process of this test run that imports tritonclient."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    atexit.register(pool.shutdown)
    return pool


def _infer(
    target: str, model: str, inputs: dict[str, Array], outputs: list[str], parameters: dict[str, Any]
) -> dict[str, Array]:
    from tritonclient import grpc as triton  # noqa: PLC0415 - only in this process
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype  # noqa: PLC0415

    tensors = []
    for name, array in inputs.items():
        tensor = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    requested = [triton.InferRequestedOutput(name) for name in outputs] or None
    with triton.InferenceServerClient(target) as client:
        try:
            result = client.infer(model, tensors, outputs=requested, parameters=parameters or None)
        except InferenceServerException as error:
            raise TritonError(f"{error.status()}: {error.message()}") from None
    names = outputs or [output.name for output in result.get_response().outputs]
    return {name: np.array(result.as_numpy(name)) for name in names}


def parse_configuration(text: str) -> dict[str, Any]:
    """Parses a model configuration with Triton's own schema; unknown fields and values raise ValueError."""
    answer: dict[str, Any] = in_another_process(_parse_configuration, text)
    return answer


def _parse_configuration(text: str) -> dict[str, Any]:
    from google.protobuf import json_format, text_format  # noqa: PLC0415 - only in this process
    from tritonclient.grpc.model_config_pb2 import ModelConfig  # noqa: PLC0415 - only in this process

    try:
        message = text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise ValueError(str(error)) from None
    return json_format.MessageToDict(message, preserving_proto_field_name=True)
