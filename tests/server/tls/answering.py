"""A transport with TLS that answers every call and notes who made it."""

import queue
from pathlib import Path

from attention_serving.server.api.admission import client_of, peer_identities
from attention_serving.server.tls.files import CurrentCertificates
from attention_serving.server.transport import TransportKind, create_transport
from attention_serving.server.transport.call import Call
from attention_serving.server.transport.options import private_credentials, tls_credentials
from tests.server.seams import PATIENCE_SECONDS
from tests.support.certificates import HOST

# A ServerLiveResponse of a server that lives.
REPLY = b"\x08\x01"


class Answering:
    """A started transport on a port with TLS, on one Unix domain socket and on a private one.

    Attributes:
        port: The port.
        open_socket: The target of the socket that any process may connect to.
        private_socket: The target of the private one.
    """

    def __init__(self, kind: TransportKind, current: CurrentCertificates, folder: Path) -> None:
        self._callers: queue.SimpleQueue[tuple[tuple[str, ...], str]] = queue.SimpleQueue()
        self._transport = create_transport(kind, {"grpc.so_reuseport": 0}, max_calls=64)
        self.port = self._transport.listen(f"{HOST}:0", tls_credentials(current))
        self.open_socket, self.private_socket = f"unix:{folder}/open", f"unix:{folder}/private"
        self._transport.listen(self.open_socket)
        self._transport.listen(self.private_socket, private_credentials())
        self._transport.start(self._serve, lambda: False)

    def next_caller(self) -> tuple[tuple[str, ...], str]:
        """The names in the certificate of the next call's client, and its connection."""
        return self._callers.get(timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        self._transport.stop(0, lambda: None)

    async def _serve(self, call: Call) -> None:
        self._callers.put((peer_identities(call), client_of(call)))
        await call.message()
        call.reply(REPLY)
