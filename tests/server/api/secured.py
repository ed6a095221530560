"""A server that knows some identities, and calls of them."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from attention_client.errors import from_rpc_error

from attention_serving.server.transport.call import Metadata
from tests.server.seams import PATIENCE_SECONDS, Served
from tests.server.security.samples import entry

ATTEND = "/attention.v1.AttentionService/Attend"
STREAM = "/attention.v1.AttentionService/AttendStream"
LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
LOGS = "/inference.GRPCInferenceService/LogSettings"
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
ENTRIES = (
    entry("all", "all-token", "infer:*", "read", "admin"),
    entry("caller", "caller-token", "infer:tiny-*"),
    entry("other", "other-token", "infer:unknown-*"),
    entry("reader", "reader-token", "read:tiny-s*"),
    entry("old", "old-token", "infer:*", expires="2020-01-01T00:00:00Z"),
    entry("limited", "limited-token", "infer:*", max_calls=1),
)


class Secured(NamedTuple):
    """A server that knows the identities, and its file of them."""

    served: Served
    file: Path


def bearer(token: str | None) -> Metadata:
    return () if token is None else (("authorization", f"Bearer {token}"),)


def headers_only(
    served: Served, method: str, *metadata: tuple[str, str | bytes], timeout: float = PATIENCE_SECONDS
) -> tuple[grpc.StatusCode, str]:
    """Code and reason of a call of which nothing but the headers is ever sent within a timeout in seconds."""
    never = threading.Event()

    def messages() -> Iterator[bytes]:
        never.wait(PATIENCE_SECONDS)
        yield b""

    call: Any = served.channel.stream_stream(method)
    try:
        with pytest.raises(grpc.RpcError) as raised:
            list(call(messages(), metadata=metadata, timeout=timeout))
    finally:
        never.set()
    return raised.value.code(), from_rpc_error(raised.value).reason
