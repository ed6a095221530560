"""The rights of a call for one model. The name is known once the message has been parsed or recalled."""

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import ModelNotFoundError, quoted
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.repository import Model, Repository
from attention_serving.server.rpc.transport.call import Call
from attention_serving.server.security.rights import Right


class Named(Protocol):
    """What has the name of a model."""

    @property
    def name(self) -> str:
        """Name of the model."""


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
    if call.identity is None:
        return engine.model(name, version)
    call.identity.require_model(Right.INFER, name)
    try:
        return engine.model(name, version)
    except ModelNotFoundError as error:
        raise _for(call, name, error) from None


def readable_model(engine: Engine, call: Call, name: str, version: str) -> LoadedModel:
    """The model that a request names, if the caller may read it.

    Raises:
        PermissionDeniedError: The caller may not.
        ModelNotFoundError: The model or version does not exist.
        ModelNotReadyError: The model failed to load.
    """
    require(call, Right.READ, name)
    try:
        return engine.model(name, version)
    except ModelNotFoundError as error:
        raise _for(call, name, error) from None


def readable_in_any_state(repository: Repository, call: Call, name: str, version: str) -> Model:
    """As `readable_model`; models that failed to load included."""
    require(call, Right.READ, name)
    try:
        return repository.find(name, version)
    except ModelNotFoundError as error:
        raise _for(call, name, error) from None


def readable(models: Iterable[N], call: Call) -> Iterator[N]:
    """Those of some models that the caller may read."""
    identity = call.identity
    if identity is None:
        yield from models
        return
    yield from (model for model in models if identity.rights.covers(Right.READ, model.name))


def _for(call: Call, name: str, error: ModelNotFoundError) -> ModelNotFoundError:
    """The error without the names of models that the caller may not read."""
    if call.identity is None or call.identity.rights.reads_every_model:
        return error
    return ModelNotFoundError(
        f"model {quoted(name)}, or the version of it, does not exist", field=error.field
    )
