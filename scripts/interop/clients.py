"""Clients of other projects, each in an environment of its own. Prints each call that worked.

`python clients.py CLIENT GRPC_TARGET HTTP_URL MODEL DATA`: CLIENT is kserve or mlserver; DATA is an .npz file
with `query` and the `context_vectors` that are expected.
"""

import asyncio
import sys

import numpy as np


async def kserve(grpc_target: str, http_url: str, model: str, data: str) -> None:
    """KServe's SDK, over gRPC and HTTP."""
    from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest  # noqa: PLC0415
    from kserve.inference_client import RESTConfig  # noqa: PLC0415

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
                found = outputs["context_vectors"].as_numpy()
                np.testing.assert_array_equal(found, arrays["context_vectors"])
                print(kind, "infer,", "binary" if binary else "JSON")


async def mlserver(grpc_target: str, _http_url: str, model: str, data: str) -> None:
    """MLServer's gRPC stubs and converters."""
    import grpc  # noqa: PLC0415
    from mlserver.codecs import NumpyCodec  # noqa: PLC0415
    from mlserver.grpc import converters  # noqa: PLC0415
    from mlserver.grpc import dataplane_pb2 as pb  # noqa: PLC0415
    from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub  # noqa: PLC0415
    from mlserver.types import InferenceRequest  # noqa: PLC0415

    arrays = np.load(data)
    with grpc.insecure_channel(grpc_target) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ModelMetadata(pb.ModelMetadataRequest(name=model)).inputs
        print("ModelMetadata")
        request = InferenceRequest(inputs=[NumpyCodec.encode_input("query", arrays["query"])])
        for raw in (False, True):
            message = converters.ModelInferRequestConverter.from_types(request, model, use_raw=raw)
            answer = converters.ModelInferResponseConverter.to_types(stub.ModelInfer(message))
            outputs = {output.name: output for output in answer.outputs}
            found = NumpyCodec.decode_output(outputs["context_vectors"])
            np.testing.assert_array_equal(found, arrays["context_vectors"])
            print("ModelInfer,", "raw" if raw else "typed")


asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
