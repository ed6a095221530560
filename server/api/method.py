"""A gRPC method: its kind, handler, required right and memory budget.

Who calls, and the right for the method, are checked before: see `server.api.admission`. The right for a model
is checked here, once the request has named it, before anyone looks for the model.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Literal, TypeAlias, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.errors import (
    InvalidRequestError,
    LimitExceededError,
    ModelNotFoundError,
    quoted,
)
from attention_serving.server.engine.models.control import IndexEntry
from attention_serving.server.engine.models.repository import Model, Permit, Repository
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

# Larger requests are decoded on the codec threads unless cached; control methods refuse them. Handing over
# costs 60 us; decoding this much takes 1 ms at worst.
LARGE_BYTES = 64 << 10
Q = TypeVar("Q")
M = TypeVar("M")
N = TypeVar("N", bound=Model | IndexEntry)


# How many requests and replies a call has: one and one; one reply for each request, in the order of the
# requests; one request and any number of replies; any number of requests and one reply to all.
CallKind: TypeAlias = Literal["unary", "ordered stream", "server stream", "client stream"]
# By whether a method of a contract takes a stream, and whether it answers with one.
CALL_KINDS: Mapping[tuple[bool, bool], CallKind] = {
    (False, False): "unary",
    (False, True): "server stream",
    (True, False): "client stream",
    (True, True): "ordered stream",
}
ModelKind: TypeAlias = Literal["encoder", "classifier", "late_interaction"]
KIND_NAMES: Mapping[ModelKind, str] = {
    "encoder": "text encoders",
    "classifier": "text classifiers",
    "late_interaction": "multi-vector encoders",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Method:
    """How calls of one method are handled.

    Attributes:
        kind: How many requests and replies a call has.
        handle: Answers a serialized request with a serialized reply: `await handle(message, call,
            reservation)`. Of a server stream, `handle(message)`, which yields replies until the drain. Of a
            client stream, `message` is the list of all messages.
        is_inference: Whether calls take a slot of inference: see `server.api.admission`. Those that only
            tell what the server is and does take none: a busy server is live and ready.
        is_counted: Whether calls are reported to the metrics. Those of gRPC's own services are not.
        right: What a caller needs, where callers have to say who they are; None opens the method to everyone.
            A method that states nothing is one for administrators.
        budget: Where `handle` reserves the memory of each request, which is released once its reply was sent;
            None for requests of a few names, whose reservation is None too.
    """

    kind: CallKind = "unary"
    handle: Callable[..., Any]
    is_inference: bool = False
    is_counted: bool = True
    right: Right | None = Right.ADMIN
    budget: MemoryBudget | None = None


def control_method(
    parse_message: Callable[[bytes], Q], handle: Callable[[Q, Call], Any], **options: Any
) -> Method:
    """A method whose requests consist of a few names; any but a server stream.

    Args:
        parse_message: Parses a request; raises DecodeError.
        handle: Returns the reply, None for an empty one, or an awaitable of either.
        options: The other attributes of the `Method`.
    """

    async def answer(message: bytes, call: Call, _reservation: Reservation | None) -> bytes:
        reply: Any = handle(parse(parse_message, message, LARGE_BYTES), call)
        if isawaitable(reply):
            reply = await reply
        return b"" if reply is None else reply.SerializeToString()

    return Method(handle=answer, **options)


def control_methods(
    service: ServiceDescriptor, right: Right | None, *, is_counted: bool = True, **handlers: Any
) -> dict[str, Method]:
    """Control methods of a service, by their full names: see `control_method`."""
    methods = {}
    for name, handle in handlers.items():
        rpc = service.methods_by_name[name]
        kind = CALL_KINDS[rpc.client_streaming, rpc.server_streaming]
        parse_message, path = GetMessageClass(rpc.input_type).FromString, f"/{service.full_name}/{name}"
        methods[path] = control_method(parse_message, handle, kind=kind, is_counted=is_counted, right=right)
    return methods


def parse(parse_message: Callable[[bytes], Q], message: bytes, limit: int | None = None) -> Q:
    """Parses a request.

    Args:
        parse_message: Parses it; raises DecodeError.
        message: The request.
        limit: Its largest size; None if it may be as large as the transport permits.

    Raises:
        InvalidRequestError: The bytes are not a message of the method's type.
        LimitExceededError: The message is larger than the limit.
    """
    if limit is not None and len(message) > limit:
        raise LimitExceededError("message", f"has {len(message)} bytes; the limit of this method is {limit}")
    try:
        return parse_message(message)
    except DecodeError as error:
        raise InvalidRequestError("message", f"is not a request of this method: {error}") from error


def has_right(call: Call, right: Right, model: str) -> bool:
    """Whether a call has a right for a model, which need not exist."""
    return call.identity is None or call.identity.rights.covers(right, model)


def require_right(call: Call, right: Right, model: str, sent_name: str) -> None:
    """Checks the right of a call for a model, before anyone looks whether the model exists.

    Args:
        call: The call.
        right: What the caller needs.
        model: The model's own name.
        sent_name: The name or alias in the request, which errors show.

    Raises:
        PermissionDeniedError: The caller does not have it.
    """
    if call.identity is not None:
        call.identity.require_model(right, model, sent_name)


def find_model(find: Callable[[str, str, Permit], M], call: Call, right: Right, name: str, version: str) -> M:
    """The model that a request names, if the caller has a right for it.

    Errors do not tell the names of models that the caller may not read.

    Args:
        find: Finds the model: `Repository.ready`, or `Repository.find` with those that failed to load.
        call: The call.
        right: What the caller needs.
        name: Name or alias of the model.
        version: Its version; empty for the highest.

    Raises:
        PermissionDeniedError: The caller does not have the right.
        ModelNotFoundError: The model or version does not exist.
        ModelNotReadyError: The model failed to load.
    """
    try:
        return find(name, version, lambda model: require_right(call, right, model, name))
    except ModelNotFoundError as error:
        if call.identity is None or call.identity.rights.reads_every_model:
            raise
        message = f"model {quoted(name)}, or the version of it, does not exist"
        raise ModelNotFoundError(message, field=error.field) from None


def default_model(repository: Repository, call: Call, *kinds: ModelKind, heads: Collection[str] = ()) -> str:
    """The name of the model of a request for texts that names none.

    That is the server's default model, unless it is of another kind or the caller may not use it; otherwise
    the only one of the first kind of which there are any that the caller may use. Of several text encoders,
    those count that have the heads that are asked for.

    Raises:
        InvalidRequestError: There is none, or there are several.
    """
    models = [*filter_permitted(repository.loaded_models, call, Right.INFER)]
    default = repository.resolve(repository.default_name)
    is_of_kind = [any(getattr(model, kind) for kind in kinds) for model in models if model.name == default]
    if default and all(is_of_kind) and has_right(call, Right.INFER, default):
        return default
    for kind in kinds:
        of_kind = [model for model in models if getattr(model, kind)]
        suited = [model for model in of_kind if {*model.heads} >= {*heads}] or of_kind
        if len(names := {model.name for model in suited}) == 1:
            return names.pop()
        if names:
            break
    kinds = (kind,) if names else kinds
    problem = f"is required: {len(names)} {' or '.join(KIND_NAMES[kind] for kind in kinds)} are ready"
    advice = "send the name of one, or the header model-id over HTTP, or start the server with --model-id"
    raise InvalidRequestError("model_name", f"{problem}; {advice}")


def filter_permitted(models: Iterable[N], call: Call, right: Right = Right.READ) -> Iterator[N]:
    """Those of some models for which the caller has a right."""
    return (model for model in models if has_right(call, right, model.name))
