"""A server that stops keeps each connection until the peer has received the replies on it."""

import os
import socket
import threading
from contextlib import closing

import grpc
import pytest

from attention_serving.server.transport.drain import stop_listening
from tests.server.seams import PATIENCE_SECONDS
from tests.server.transport.test_transports import Listening

HOST = "127.0.0.1"
# Fits the initial windows of HTTP/2, so that the core hands all of it to the system.
REPLY = bytes(60_000)
SMALL_BUFFER = 4096
CHUNK = 1024
# An HTTP/2 frame of type PING: 8 bytes, for stream 0.
PING = b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)


class SlowPeer:
    """Forwards one connection. What the server sends is held back from `hold` to `release`."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._released = threading.Event()
        self._released.set()
        self._upstream = socket.socket()
        self._upstream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        self._upstream.connect((HOST, port))
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def hold(self) -> None:
        self._released.clear()

    def release(self) -> None:
        """Sends the server a frame, as a peer does that receives, and goes on."""
        self._upstream.sendall(PING)
        self._released.set()

    def close(self) -> None:
        self._released.set()
        self._upstream.close()
        self._listener.close()

    def _forward(self) -> None:
        downstream, _ = self._listener.accept()
        up = threading.Thread(target=copy, args=(downstream, self._upstream), daemon=True)
        up.start()
        with closing(downstream):
            copy(self._upstream, downstream, self._released)


def copy(source: socket.socket, target: socket.socket, released: threading.Event | None = None) -> None:
    """Copies until either end is closed or reset."""
    try:
        while chunk := source.recv(CHUNK):
            if released is not None:
                released.wait(PATIENCE_SECONDS)
            target.sendall(chunk)
    except OSError:
        return


def test_listening_ends_for_the_socket_whatever_its_descriptor_becomes() -> None:
    with (
        socket.create_server((HOST, 0)) as listener,
        socket.create_connection(listener.getsockname()) as peer,
    ):
        accepted, address = listener.accept()[0], listener.getsockname()
        identity = os.fstat(listener.fileno())
        stop_listening([address[1]])
        assert os.path.samestat(os.fstat(listener.fileno()), identity)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with socket.create_server(address), closing(accepted):  # of the next server, while this one drains
            accepted.sendall(b"goes on")
            assert peer.recv(16) == b"goes on"


def test_a_reply_reaches_a_slow_peer_although_the_server_stops() -> None:
    listening = Listening()
    peer = SlowPeer(listening.port)
    with closing(peer), grpc.insecure_channel(f"{HOST}:{peer.port}") as channel:
        sent, call = listening.hold(channel)
        stopping = threading.Thread(target=listening.transport.stop, args=(PATIENCE_SECONDS, list))
        stopping.start()
        stopping.join(0.2)  # the client acknowledges that the server goes away
        peer.hold()
        call.post(lambda: call.finish(grpc.StatusCode.OK, message=REPLY))
        stopping.join(0.3)  # a server that does not wait for its peers has closed the connection by then
        peer.release()
        assert sent.result() == REPLY
        stopping.join(PATIENCE_SECONDS)
        assert not stopping.is_alive()
