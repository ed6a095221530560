"""Who may call: the identity of a caller, its right for a method and for a model, and what it may hold.

Identity, right and shares are checked before anything of a call is received; the right for a model, once the
request has named it, and before anyone looks whether the model exists.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.wrappers_pb2 import StringValue

from attention_serving.server.access_question import METHOD, SEPARATOR
from attention_serving.server.api.identity_shares import AccountShares, PlaceShares
from attention_serving.server.api.method import CallKind, Method, of_names
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError, ModelNotFoundError, quoted
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Model, Repository
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.identities import Identity
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call


class CallAccess:
    """Admits the calls of identities that have the right for them. Belongs to the transport's thread."""

    def __init__(self, guard: Guard, *, max_calls: int, max_streams: int, share: float) -> None:
        """Creates the access of a server.

        Args:
            guard: Knows the identities.
            max_calls: The server's limit of inference calls, of which identities hold shares.
            max_streams: The limit of streams among them.
            share: Part of each limit, and of the memory, that one identity may hold while nobody else does.
        """
        self._guard = guard
        self._calls = PlaceShares("calls", max_calls, share)
        self._streams = PlaceShares("streams", max_streams, share)
        self._accounts = AccountShares(share)

    def admit(self, call: Call, method: Method, keep: Callable[[Callable[[], object]], object]) -> None:
        """Notes who calls, and takes what inference holds of the identity's shares.

        Args:
            call: The call.
            method: Its method.
            keep: Is given what gives a share back, once the core is done with the call.

        Raises:
            CredentialsError: It is not known who calls.
            PermissionDeniedError: The identity does not have the right.
            IdentityLimitError: The identity holds its share.
        """
        if method.right is None:
            return
        identity = self._identify(call, method)
        call.identity = identity
        if not method.is_inference:
            return
        call.account = self._accounts.of(identity)
        keep(self._calls.take(identity, identity.limits.max_calls))
        if method.kind is CallKind.ORDERED_STREAM:
            keep(self._streams.take(identity))

    def check_again(self, call: Call, method: Method) -> None:
        """Checks a stream whose next message has arrived: the token may have expired or been revoked.

        Raises:
            CredentialsError: It is not known any more who calls.
            PermissionDeniedError: The identity does not have the right any more.
        """
        if method.right is not None:
            call.identity = self._identify(call, method)

    def check(self, call: Call, method: Method) -> Identity | None:
        """Who calls, if the caller may call a method; None if everyone may.

        Raises:
            CredentialsError: It is not known who calls.
            PermissionDeniedError: The identity does not have the right.
        """
        return None if method.right is None else self._identify(call, method)

    def _identify(self, call: Call, method: Method) -> Identity:
        identity = self._guard.identify(call.metadata, call.peer_identities, call.client)
        if method.right is not None:
            identity.require(method.right)
        return identity


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


def check_method(access: CallAccess | None, others: Mapping[str, Method]) -> dict[str, Method]:
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
                require(call, asked.right, model)
        return Empty()

    method = of_names(StringValue.FromString, check, Empty.SerializeToString, is_counted=False, right=None)
    return {METHOD: method}
