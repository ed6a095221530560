"""KServe's SDK, over gRPC and HTTP, in an environment of its own. Prints each call that worked.

`python kserve_client.py GRPC_TARGET HTTP_URL MODEL DATA`: DATA is an .npz file with `query` and the
`context_vectors` that are expected.
"""

import asyncio
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig


async def check(grpc_target: str, http_url: str, model: str, data: str) -> None:
    """Asks for health, and infers in each form."""
    arrays = np.load(data)
    questions = (("is_server_live", ()), ("is_server_ready", ()), ("is_model_ready", (model,)))

    def request(*, binary: bool) -> InferRequest:
        tensor = InferInput("query", list(arrays["query"].shape), "FP32")
        tensor.set_data_from_numpy(arrays["query"], binary_data=binary)
        return InferRequest(model_name=model, infer_inputs=[tensor])

    for kind, client, where in (
        ("gRPC", InferenceGRPCClient(grpc_target), ()),
        ("HTTP", InferenceRESTClient(RESTConfig(protocol="v2")), (http_url,)),
    ):
        async with client:
            for call, arguments in questions:
                assert await getattr(client, call)(*where, *arguments)
                print(kind, call)
            for binary in (True, False) if where else (True,):
                answer = await client.infer(*where, request(binary=binary), *([model] if where else []))
                outputs = {output.name: output for output in answer.outputs}
                context_vectors = outputs["context_vectors"].as_numpy()
                np.testing.assert_array_equal(context_vectors, arrays["context_vectors"])
                print(kind, "infer,", "binary" if binary else "JSON")


asyncio.run(check(*sys.argv[1:]))
