"""The right of a call for a model: checked once the request has named it, before anyone looks for the model.

Who calls, and the right for the method, are checked before: see `server.api.admission`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.wrappers_pb2 import StringValue

from attention_serving.server.access_question import METHOD, SEPARATOR
from attention_serving.server.api.method import Method, of_names
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError, ModelNotFoundError, quoted
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Model, Repository
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


def model_to_infer(engine: Engine, call: Call, name: str, version: str) -> LoadedModel:
    """The model that a request names, if the caller may infer with it.

    Raises:
        PermissionDeniedError: The caller may not.
        ModelNotFoundError: The model or version does not exist.
        ModelNotReadyError: The model failed to load.
    """
    return _found(engine.model, call, Right.INFER, name, version)


def readable_model(engine: Engine, call: Call, name: str, version: str) -> LoadedModel:
    """As `model_to_infer`, if the caller may read it."""
    return _found(engine.model, call, Right.READ, name, version)


def readable_in_any_state(repository: Repository, call: Call, name: str, version: str) -> Model:
    """As `readable_model`; models that failed to load included."""
    return _found(repository.find, call, Right.READ, name, version)


def _found(find: Callable[[str, str], M], call: Call, right: Right, name: str, version: str) -> M:
    """Errors do not tell the names of models that the caller may not read."""
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
    identity = call.identity
    if identity is None:
        yield from models
        return
    yield from (model for model in models if identity.rights.covers(Right.READ, model.name))


def check_method(identify: Callable[[Call, Method], None], others: Mapping[str, Method]) -> dict[str, Method]:
    """The method.

    Args:
        identify: Notes who calls, and checks the right for a method: `Admission.identify`.
        others: The methods that are asked about.
    """

    def check(request: StringValue, call: Call) -> Empty:
        method, _, model = request.value.partition(SEPARATOR)
        asked = others.get(method)
        if asked is None:
            raise InvalidRequestError("value", "is not a method of this server")
        identify(call, asked)
        if model and asked.right is not None:
            require(call, asked.right, model)
        return Empty()

    method = of_names(StringValue.FromString, check, Empty.SerializeToString, is_counted=False, right=None)
    return {METHOD: method}
