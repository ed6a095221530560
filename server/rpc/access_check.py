"""Answers the question of `server.rpc.access_question`."""

from collections.abc import Mapping

from google.protobuf.empty_pb2 import Empty
from google.protobuf.wrappers_pb2 import StringValue

from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.rpc import model_rights
from attention_serving.server.rpc.access import CallAccess
from attention_serving.server.rpc.access_question import METHOD, SEPARATOR
from attention_serving.server.rpc.calls.method import Method, of_names
from attention_serving.server.rpc.transport.call import Call


def methods(access: CallAccess | None, others: Mapping[str, Method]) -> dict[str, Method]:
    """The method.

    Args:
        access: Checks who calls; None lets everyone do everything.
        others: The methods that are asked about.
    """

    def check(request: StringValue, call: Call) -> Empty:
        method, _, model = request.value.partition(SEPARATOR)
        asked = others.get(method)
        if asked is None:
            raise InvalidRequestError("value", "is not a method of this server")
        if access is not None:
            call.identity = access.check(call, asked)
            if model and asked.right is not None:
                model_rights.require(call, asked.right, model)
        return Empty()

    method = of_names(StringValue.FromString, check, Empty.SerializeToString, is_counted=False, right=None)
    return {METHOD: method}
