"""Answers the question of `server.rpc.access_question`."""

from collections.abc import Mapping

from google.protobuf.empty_pb2 import Empty
from google.protobuf.wrappers_pb2 import StringValue

from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.rpc import model_rights
from attention_serving.server.rpc.access import CallAccess
from attention_serving.server.rpc.access_question import METHOD, SEPARATOR
from attention_serving.server.rpc.calls.route import Route, unary
from attention_serving.server.rpc.transport.seam import Call


def routes(access: CallAccess | None, others: Mapping[str, Route]) -> dict[str, Route]:
    """The route of the method.

    Args:
        access: Checks who calls; None lets everyone do everything.
        others: The routes of the methods that are asked about.
    """

    def check(request: StringValue, call: Call) -> Empty:
        method, _, model = request.value.partition(SEPARATOR)
        route = others.get(method)
        if route is None:
            raise InvalidRequestError("value", "is not a method of this server")
        if access is not None:
            call.identity = access.check(call, route)
            if model and route.right is not None:
                model_rights.require(call, route.right, model)
        return Empty()

    route = unary(
        StringValue.FromString, check, Empty.SerializeToString, counted=False, takes_place=False, right=None
    )
    return {METHOD: route}
