"""A gRPC client that misbehaves on the level of HTTP/2: half-sent messages, answers that are never read."""

import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from hpack import Decoder, Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
FRAME_BYTES = 1 << 14
# What a sender may send on a connection before the receiver says more.
CONNECTION_WINDOW = (1 << 16) - 1
PREFIX = struct.Struct(">BI")
"""What precedes each message: whether it is compressed, and its length."""
CODES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass
class RawCall:
    """How a call ended; `end` is empty while it is open."""

    status: int | None = None
    end: str = ""


class RawConnection:
    """One HTTP/2 connection, on which calls are opened and need not be finished or read.

    Attributes:
        calls: By stream.
        closed: Whether the server has closed the connection.
    """

    def __init__(self, port: int, *, window: int = CONNECTION_WINDOW) -> None:
        """Connects.

        Args:
            port: The server's port on loopback.
            window: How many bytes of each answer the server may send; 0 lets it send none.
        """
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._encoder, self._decoder = Encoder(), Decoder()
        self._room = CONNECTION_WINDOW
        self._received = bytearray()
        self.calls: dict[int, RawCall] = {}
        self.closed = False
        settings = {SettingsFrame.INITIAL_WINDOW_SIZE: window, SettingsFrame.ENABLE_PUSH: 0}
        self._socket.sendall(PREFACE + SettingsFrame(settings=settings).serialize())

    def open(self, method: str) -> int:
        """Opens a call by its headers only; returns its stream."""
        stream = 2 * len(self.calls) + 1
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "127.0.0.1"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
        self.calls[stream] = RawCall()
        self._send(HeadersFrame(stream, self._encoder.encode(headers), flags=["END_HEADERS"]))
        return stream

    def send_part(self, stream: int, message: bytes, size: int) -> None:
        """Sends the first bytes of a message and its announced length; the rest never follows."""
        self._send(DataFrame(stream, (PREFIX.pack(0, len(message)) + message)[:size]))

    def call(self, method: str, message: bytes) -> None:
        """Makes a whole call of at most 64 KB; does not wait for its answer."""
        stream = self.open(method)
        data = PREFIX.pack(0, len(message)) + message
        for at in range(0, len(data), FRAME_BYTES):
            part = data[at : at + FRAME_BYTES]
            while self._room < len(part) and not self.closed:
                self.receive(0.1)
            self._room -= len(part)
            flags = ["END_STREAM"] if at + FRAME_BYTES >= len(data) else []
            self._send(DataFrame(stream, part, flags=flags))

    def receive(self, seconds: float) -> None:
        """Waits that long for bytes and handles them."""
        self._socket.settimeout(max(seconds, 0.001))
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            self.closed = True
            for call in self.calls.values():
                call.end = call.end or "connection closed"
        self._received += data
        while len(self._received) >= FRAME_HEADER_BYTES:
            frame, length = Frame.parse_frame_header(memoryview(bytes(self._received[:FRAME_HEADER_BYTES])))
            end = FRAME_HEADER_BYTES + length
            if len(self._received) < end:
                break
            frame.parse_body(memoryview(bytes(self._received[FRAME_HEADER_BYTES:end])))
            del self._received[:end]
            self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        call = self.calls.get(frame.stream_id, RawCall())
        match frame:
            case SettingsFrame() | PingFrame() if "ACK" not in frame.flags:
                reply = PingFrame(0, frame.opaque_data) if isinstance(frame, PingFrame) else SettingsFrame(0)
                reply.flags.add("ACK")
                self._send(reply)
            case WindowUpdateFrame() if not frame.stream_id:
                self._room += frame.window_increment
            case RstStreamFrame():
                call.end = call.end or f"RST_STREAM {frame.error_code}"
            case HeadersFrame():
                headers: dict[Any, Any] = dict(self._decoder.decode(frame.data))
                status = headers.get("grpc-status")
                call.status = call.status if status is None else int(status)
        if "END_STREAM" in frame.flags:
            call.end = "no status" if call.status is None else CODES[call.status]

    def receive_for(self, seconds: float) -> None:
        """Handles what arrives during that time, or until every call has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.open_calls and not self.closed:
            self.receive(min(0.1, until - time.monotonic()))

    @property
    def open_calls(self) -> int:
        """Number of calls that have not ended."""
        return sum(not call.end for call in self.calls.values())

    def _send(self, frame: Frame) -> None:
        with suppress(OSError):  # the server has closed the connection; `receive` notes it
            self._socket.settimeout(None)
            self._socket.sendall(frame.serialize())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
