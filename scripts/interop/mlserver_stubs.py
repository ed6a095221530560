"""MLServer's gRPC stubs and converters. Prints each call that worked. Runs in an environment of its own.

`python mlserver_stubs.py GRPC_TARGET HTTP_URL MODEL DATA`: DATA is an .npz file with `query` and the
`context_vectors` that are expected.
"""

import sys

import grpc
import numpy as np
from mlserver.codecs import NumpyCodec
from mlserver.grpc import converters
from mlserver.grpc import dataplane_pb2 as messages
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub
from mlserver.types import InferenceRequest


def main(target: str, _http_url: str, model: str, data: str) -> None:
    """Makes every call of the stubs."""
    arrays = np.load(data)
    with grpc.insecure_channel(target) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(messages.ServerLiveRequest()).live
        print("ServerLive")
        assert stub.ServerReady(messages.ServerReadyRequest()).ready
        print("ServerReady")
        assert stub.ModelReady(messages.ModelReadyRequest(name=model)).ready
        print("ModelReady")
        assert stub.ServerMetadata(messages.ServerMetadataRequest()).name
        print("ServerMetadata")
        assert stub.ModelMetadata(messages.ModelMetadataRequest(name=model)).inputs
        print("ModelMetadata")
        request = InferenceRequest(inputs=[NumpyCodec.encode_input("query", arrays["query"])])
        for raw in (False, True):
            message = converters.ModelInferRequestConverter.from_types(request, model, use_raw=raw)
            answer = converters.ModelInferResponseConverter.to_types(stub.ModelInfer(message))
            outputs = {output.name: output for output in answer.outputs}
            found = NumpyCodec.decode_output(outputs["context_vectors"])
            np.testing.assert_array_equal(found, arrays["context_vectors"])
            print("ModelInfer,", "raw" if raw else "typed")


main(*sys.argv[1:])
