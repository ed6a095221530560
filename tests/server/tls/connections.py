"""Calls over TLS to a transport that answers each of them and notes who made it."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from attention_serving.server.api.admission import peer_identities
from attention_serving.server.tls.files import CurrentCertificates
from attention_serving.server.transport import TransportKind, create_transport
from attention_serving.server.transport.call import Call
from attention_serving.server.transport.options import private_credentials, tls_credentials
from tests.server.seams import PATIENCE_SECONDS
from tests.support.certificates import HOST, Pair

METHOD = "/any/Method"
# Also a ServerLiveResponse of a server that lives.
REPLY = b"\x08\x01"


class Answering:
    """A started transport on a port with TLS, on one Unix domain socket and on a private one.

    Attributes:
        port: The port.
        open_socket: The target of the socket that any process may connect to.
        private_socket: The target of the private one.
        identities: The names of the peer of each call that has arrived.
    """

    def __init__(self, kind: TransportKind, current: CurrentCertificates, folder: Path) -> None:
        self.identities: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        self._transport = create_transport(kind, {"grpc.so_reuseport": 0}, max_calls=64)
        self.port = self._transport.listen(f"{HOST}:0", tls_credentials(current))
        self.open_socket, self.private_socket = f"unix:{folder}/open", f"unix:{folder}/private"
        self._transport.listen(self.open_socket)
        self._transport.listen(self.private_socket, private_credentials())
        self._transport.start(self._serve, lambda: False)

    def next_identities(self) -> tuple[str, ...]:
        return self.identities.get(timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        self._transport.stop(0, lambda: None)

    async def _serve(self, call: Call) -> None:
        self.identities.put(peer_identities(call))
        await call.message()
        call.reply(REPLY)


@contextmanager
def connected(port: int, ca: bytes, pair: Pair | None = None) -> Iterator[grpc.Channel]:
    """A channel with connections of its own."""
    key, certificate = (pair.key, pair.certificate) if pair else (None, None)
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"{HOST}:{port}", credentials, options) as channel:
        yield channel


def call_on(channel: grpc.Channel, *metadata: tuple[str, bytes]) -> bytes:
    method: Any = channel.unary_unary(METHOD)
    reply: bytes = method(b"", timeout=PATIENCE_SECONDS, metadata=metadata)
    return reply


def call(port: int, ca: bytes, pair: Pair | None = None) -> bytes:
    """One call on a connection of its own."""
    with connected(port, ca, pair) as channel:
        return call_on(channel)
