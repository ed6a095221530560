"""Calls every public method of an unmodified tritonclient. Runs where tritonclient can be imported."""

import asyncio
import queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _client(target: str) -> Any:
    from tritonclient import grpc  # noqa: PLC0415

    return grpc.InferenceServerClient(target)


def _inputs(name: str, array: Array) -> Any:
    from tritonclient.grpc import InferInput  # noqa: PLC0415
    from tritonclient.utils import np_to_triton_dtype  # noqa: PLC0415

    tensor = InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def ask(target: str, method: str, *arguments: Any, **options: Any) -> Any:
    """The answer of a method as JSON values, or the error as text."""
    from tritonclient.utils import InferenceServerException  # noqa: PLC0415

    with _client(target) as client:
        try:
            return getattr(client, method)(*arguments, **options)
        except InferenceServerException as error:
            return f"{error.status()}: {error.message()}"


def stream(target: str, model: str, queries: list[Array], *, wants_final: bool = False) -> list[Any]:
    """Sends requests on one stream. Returns for each the outputs or the error, and the final parameter."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with _client(target) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for index, query in enumerate(queries):
            client.async_stream_infer(
                model,
                [_inputs("query", query)],
                request_id=str(index),
                enable_empty_final_response=wants_final,
            )
        found = [answers.get(timeout=60) for _ in queries]
        client.stop_stream()
    return [_answer(result, error) for result, error in found]


def asynchronous(target: str, model: str, query: Array) -> Any:
    """Sends one request with `async_infer`, and closes the client by its method."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client = _client(target)
    client.async_infer(
        model, [_inputs("query", query)], callback=lambda result, error: answers.put((result, error))
    )
    found = answers.get(timeout=60)
    client.close()
    return _answer(*found)


def in_asyncio(target: str, model: str, queries: list[Array]) -> dict[str, Any]:
    """What the client of asyncio sees: each kind of method once, and a stream of several requests."""
    return asyncio.run(_in_asyncio(target, model, queries))


async def _in_asyncio(target: str, model: str, queries: list[Array]) -> dict[str, Any]:
    from tritonclient.grpc import aio  # noqa: PLC0415

    async def requests() -> Any:
        for index, query in enumerate(queries):
            yield {"model_name": model, "inputs": [_inputs("query", query)], "request_id": str(index)}

    async with aio.InferenceServerClient(target) as client:
        streamed = [_answer(result, error) async for result, error in client.stream_infer(requests())]
        single = await client.infer(model, [_inputs("query", queries[0])])
        statistics = await client.get_inference_statistics(model, as_json=True)
        return {
            "live": await client.is_server_live(),
            "ready": await client.is_model_ready(model),
            "unknown": await client.is_model_ready("nonesuch"),
            "versions": (await client.get_model_metadata(model, as_json=True))["versions"],
            "config": (await client.get_model_config(model, as_json=True))["config"]["name"],
            "index": len((await client.get_model_repository_index(as_json=True))["models"]),
            "statistics": statistics["model_stats"][0]["name"],
            "logging": (await client.get_log_settings(as_json=True))["settings"]["log_error"],
            "single": single.as_numpy("context_vectors"),
            "streamed": streamed,
        }


def _answer(result: Any, error: Any) -> Any:
    if error is not None:
        return str(error)
    response = result.get_response()
    final = response.parameters["triton_final_response"].bool_param if response.parameters else None
    return response.id, result.as_numpy("context_vectors"), final


def shared(target: str, model: str, query: Array, width: int) -> dict[str, Any]:
    """Computes a query in shared memory with the result in shared memory. Returns what was seen."""
    from tritonclient import grpc  # noqa: PLC0415
    from tritonclient.utils import shared_memory  # noqa: PLC0415

    size = query.size // query.shape[-1] * width * 4
    region_in = shared_memory.create_shared_memory_region("in", "/triton-test-in", query.nbytes)
    region_out = shared_memory.create_shared_memory_region("out", "/triton-test-out", size)
    try:
        shared_memory.set_shared_memory_region(region_in, [query])
        with _client(target) as client:
            client.unregister_system_shared_memory()
            client.unregister_cuda_shared_memory()
            client.register_system_shared_memory("in", "/triton-test-in", query.nbytes)
            client.register_system_shared_memory("out", "/triton-test-out", size)
            status = client.get_system_shared_memory_status(as_json=True)
            tensor = grpc.InferInput("query", query.shape, "FP32")
            tensor.set_shared_memory("in", query.nbytes)
            wanted = grpc.InferRequestedOutput("context_vectors")
            wanted.set_shared_memory("out", size)
            result = client.infer(model, [tensor], outputs=[wanted])
            output = result.get_output("context_vectors")
            found = shared_memory.get_contents_as_numpy(region_out, np.float32, list(output.shape)).copy()
            client.unregister_system_shared_memory("in")
            left = client.get_system_shared_memory_status(as_json=True)
            client.unregister_system_shared_memory()
    finally:
        shared_memory.destroy_shared_memory_region(region_in)
        shared_memory.destroy_shared_memory_region(region_out)
    return {
        "regions": sorted(status["regions"]),
        "left": sorted(left["regions"]),
        "found": found,
        "raw": list(result.get_response().raw_output_contents),
    }


def public_methods() -> list[str]:
    """The names of the client's public methods."""
    from tritonclient import grpc  # noqa: PLC0415

    client = grpc.InferenceServerClient
    return sorted(name for name in vars(client) if not name.startswith("_"))
