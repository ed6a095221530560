"""KServe's SDK, over gRPC and HTTP. Prints each call that worked. Runs in an environment of its own.

`python kserve_sdk.py GRPC_TARGET HTTP_URL MODEL DATA`: DATA is an .npz file with `query` and the
`context_vectors` that are expected.
"""

import asyncio
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig


async def main(grpc_target: str, http_url: str, model: str, data: str) -> None:
    """Makes every call of both clients."""
    arrays = np.load(data)
    async with InferenceGRPCClient(grpc_target) as client:
        assert await client.is_server_live()
        print("gRPC is_server_live")
        assert await client.is_server_ready()
        print("gRPC is_server_ready")
        assert await client.is_model_ready(model)
        print("gRPC is_model_ready")
        compare(await client.infer(request(model, arrays["query"], binary=True)), arrays)
        print("gRPC infer")
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        assert await client.is_server_live(http_url)
        print("HTTP is_server_live")
        assert await client.is_server_ready(http_url)
        print("HTTP is_server_ready")
        assert await client.is_model_ready(http_url, model)
        print("HTTP is_model_ready")
        for binary in (False, True):
            answer = await client.infer(http_url, request(model, arrays["query"], binary=binary), model)
            compare(answer, arrays)
            print("HTTP infer,", "binary" if binary else "JSON")


def request(model: str, query: np.ndarray, *, binary: bool) -> InferRequest:
    """A request with one input."""
    tensor = InferInput("query", list(query.shape), "FP32")
    tensor.set_data_from_numpy(query, binary_data=binary)
    return InferRequest(model_name=model, infer_inputs=[tensor])


def compare(answer: object, arrays: dict[str, np.ndarray]) -> None:
    """Checks the context vectors of an answer."""
    outputs = {output.name: output for output in answer.outputs}
    np.testing.assert_array_equal(outputs["context_vectors"].as_numpy(), arrays["context_vectors"])


asyncio.run(main(*sys.argv[1:]))
