"""The right of a call for a model: checked once the request has named it, before anyone looks for the model.

Who calls, and the right for the method, are checked before: see `server.api.admission`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

from google.protobuf.wrappers_pb2 import StringValue

from attention_serving.server.api.method import Method, of_names
from attention_serving.server.engine.errors import InvalidRequestError, ModelNotFoundError, quoted
from attention_serving.server.security.peers import ACCESS_CHECK, SEPARATOR
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call


class Named(Protocol):
    """What has the name of a model."""

    @property
    def name(self) -> str:
        """Name of the model."""


M = TypeVar("M")
N = TypeVar("N", bound=Named)


def require(call: Call, right: Right, model: str) -> None:
    """Checks the right of a call for a model, before anyone looks whether the model exists.

    Raises:
        PermissionDeniedError: The caller does not have it.
    """
    if call.identity is not None:
        call.identity.require_model(right, model)


def find(find: Callable[[str, str], M], call: Call, right: Right, name: str, version: str) -> M:
    """The model that a request names, if the caller has a right for it.

    Errors do not tell the names of models that the caller may not read.

    Args:
        find: Finds the model: `Engine.model`, or `Repository.find` with those that failed to load.
        call: The call.
        right: What the caller needs.
        name: Name of the model.
        version: Its version; empty for the highest.

    Raises:
        PermissionDeniedError: The caller does not have the right.
        ModelNotFoundError: The model or version does not exist.
        ModelNotReadyError: The model failed to load.
    """
    require(call, right, name)
    try:
        return find(name, version)
    except ModelNotFoundError as error:
        if call.identity is None or call.identity.rights.reads_every_model:
            raise
        says = f"model {quoted(name)}, or the version of it, does not exist"
        raise ModelNotFoundError(says, field=error.field) from None


def readable(models: Iterable[N], call: Call) -> Iterator[N]:
    """Those of some models that the caller may read."""
    own = call.identity
    yield from (model for model in models if own is None or own.rights.covers(Right.READ, model.name))


def check_method(identify: Callable[[Call, Method], None], others: Mapping[str, Method]) -> dict[str, Method]:
    """The method.

    Args:
        identify: Notes who calls, and checks the right for a method: `Admission.identify`.
        others: The methods that are asked about.
    """

    def check(request: StringValue, call: Call) -> None:
        method, _, model = request.value.partition(SEPARATOR)
        asked = others.get(method)
        if asked is None:
            raise InvalidRequestError("value", "is not a method of this server")
        identify(call, asked)
        if model and asked.right is not None:
            require(call, asked.right, model)

    return {ACCESS_CHECK: of_names(StringValue.FromString, check, is_counted=False, right=None)}
