"""Calls an unmodified tritonclient, each public method of it, in another process.

tritonclient and protos/ both define the package `inference`, and protobuf allows one such definition
in a process.
"""

import atexit
import multiprocessing
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class TritonError(Exception):
    """tritonclient raised InferenceServerException; carries its status and message."""


def in_another_process(function: Any, *arguments: Any, **options: Any) -> Any:
    """Calls a function where tritonclient can be imported, and returns what it returns."""
    return _process().submit(function, *arguments, **options).result(timeout=120)


@cache
def _process() -> ProcessPoolExecutor:
    """The one process of this test run that imports tritonclient."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    atexit.register(pool.shutdown)
    return pool


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


def ask(target: str, method: str, *arguments: Any, **options: Any) -> Any:
    """The answer of a method as JSON values, or the error as text."""
    return in_another_process(_ask, target, method, *arguments, **options)


def parse_configuration(text: str) -> dict[str, Any]:
    """Parses a model configuration with Triton's own schema; unknown fields and values raise ValueError."""
    answer: dict[str, Any] = in_another_process(_parse_configuration, text)
    return answer


# These functions run in the other process.


def _client(target: str) -> Any:
    from tritonclient import grpc  # noqa: PLC0415

    return grpc.InferenceServerClient(target)


def _tensors(inputs: Mapping[str, Array]) -> list[Any]:
    from tritonclient.grpc import InferInput  # noqa: PLC0415
    from tritonclient.utils import np_to_triton_dtype  # noqa: PLC0415

    tensors = []
    for name, array in inputs.items():
        tensor = InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def _infer(
    target: str, model: str, inputs: dict[str, Array], outputs: list[str], parameters: dict[str, Any]
) -> dict[str, Array]:
    from tritonclient.grpc import InferRequestedOutput  # noqa: PLC0415
    from tritonclient.utils import InferenceServerException  # noqa: PLC0415

    requested = [InferRequestedOutput(name) for name in outputs] or None
    with _client(target) as client:
        try:
            result = client.infer(model, _tensors(inputs), outputs=requested, parameters=parameters or None)
        except InferenceServerException as error:
            raise TritonError(f"{error.status()}: {error.message()}") from None
    names = outputs or [output.name for output in result.get_response().outputs]
    return {name: np.array(result.as_numpy(name)) for name in names}


def _ask(target: str, method: str, *arguments: Any, **options: Any) -> Any:
    from tritonclient.utils import InferenceServerException  # noqa: PLC0415

    with _client(target) as client:
        try:
            return getattr(client, method)(*arguments, **options)
        except InferenceServerException as error:
            return f"{error.status()}: {error.message()}"


def _parse_configuration(text: str) -> dict[str, Any]:
    from google.protobuf import json_format, text_format  # noqa: PLC0415
    from tritonclient.grpc.model_config_pb2 import ModelConfig  # noqa: PLC0415

    try:
        message = text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise ValueError(str(error)) from None
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def protocol_files() -> list[bytes]:
    """The serialised FileDescriptorProtos of the client's own copy of the protocol."""
    from tritonclient.grpc import model_config_pb2, service_pb2  # noqa: PLC0415

    return [service_pb2.DESCRIPTOR.serialized_pb, model_config_pb2.DESCRIPTOR.serialized_pb]


def stream(target: str, model: str, queries: list[Array]) -> list[Any]:
    """The answers on one stream: id, context vectors and whether it is final; or the error as text."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with _client(target) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for index, query in enumerate(queries):
            tensors = _tensors({"query": query})
            client.async_stream_infer(model, tensors, request_id=str(index), enable_empty_final_response=True)
        found = [answers.get(timeout=60) for _ in queries]
        client.stop_stream()
    return [str(error) if error else _answer(result) for result, error in found]


def _answer(result: Any) -> Any:
    response = result.get_response()
    final = response.parameters["triton_final_response"].bool_param
    return response.id, result.as_numpy("context_vectors"), final


def shared(target: str, model: str, query: Array) -> tuple[Array, list[bytes]]:
    """Context vectors of a query's size, both in shared memory; and what came in the message instead."""
    from tritonclient.grpc import InferInput, InferRequestedOutput  # noqa: PLC0415
    from tritonclient.utils import shared_memory  # noqa: PLC0415

    names, size = ("in", "out"), query.nbytes
    regions = [shared_memory.create_shared_memory_region(name, f"/triton-{name}", size) for name in names]
    try:
        shared_memory.set_shared_memory_region(regions[0], [query])
        with _client(target) as client:
            for name in names:
                client.register_system_shared_memory(name, f"/triton-{name}", size)
            tensor, wanted = InferInput("query", query.shape, "FP32"), InferRequestedOutput("context_vectors")
            tensor.set_shared_memory("in", size)
            wanted.set_shared_memory("out", size)
            response = client.infer(model, [tensor], outputs=[wanted]).get_response()
            found = shared_memory.get_contents_as_numpy(regions[1], np.float32, list(query.shape)).copy()
            client.unregister_system_shared_memory()
    finally:
        for region in regions:
            shared_memory.destroy_shared_memory_region(region)
    return found, list(response.raw_output_contents)
