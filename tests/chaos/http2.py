"""A gRPC client that misbehaves on the level of HTTP/2: half-sent messages, and answers that are never read.

The framing is that of the library h2.
"""

import socket
import struct
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes, Settings
from hpack import NeverIndexedHeaderTuple
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame

FRAME_HEADER_BYTES = 9
READ_BYTES = 1 << 16
# The header that was put into the table of headers last, as HPACK refers to it.
NEWEST = b"\xbe"
PREFIX = struct.Struct(">BI")
"""What precedes each message: whether it is compressed, and its length."""


@dataclass
class RawCall:
    """One call: what the server has sent on its stream so far.

    Attributes:
        status: grpc-status of the trailers; None while there are none.
        reset: The error code of RST_STREAM; None if there was none.
        received: Bytes of messages.
        ended_at: When it ended, on `time.monotonic`'s clock; None while it is open.
    """

    status: int | None = None
    reset: int | None = None
    received: int = 0
    ended_at: float | None = None


class RawConnection:
    """One HTTP/2 connection, on which calls are opened and need not be finished or read.

    Attributes:
        calls: By stream.
        closed: Whether the server has closed the connection.
        farewell: What its GOAWAY said; empty if there was none.
    """

    def __init__(self, port: int, *, window: int = 65535) -> None:
        """Connects.

        Args:
            port: The server's port on loopback.
            window: How many bytes of each answer the server may send; 0 lets it send none.
        """
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._connection = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        settings = {SettingCodes.INITIAL_WINDOW_SIZE: window, SettingCodes.ENABLE_PUSH: 0}
        self._connection.local_settings = Settings(client=True, initial_values=settings)
        self._connection.initiate_connection()
        self.calls: dict[int, RawCall] = {}
        self.closed = False
        self.farewell = ""
        self._received = bytearray()
        self._authority = f"127.0.0.1:{port}"
        self._flush()

    def open(self, method: str) -> int:
        """Opens a call by its headers only; returns its stream."""
        stream = self._connection.get_next_available_stream_id()
        self._connection.send_headers(stream, self._head(method))
        self.calls[stream] = RawCall()
        self._flush()
        return stream

    def open_whole(self, method: str, *, references: int) -> None:
        """Makes a call without a message, whose headers refer to one header of 4 KB that many times.

        That header is sent with the first call. The others are not put into the table of headers, which has
        room for one of this size.
        """
        encoder = self._connection.encoder
        plain: list[Any] = [NeverIndexedHeaderTuple(*pair) for pair in self._head(method)]
        large = [] if self.calls else [("a", "b" * 4000)]
        stream = self._connection.get_next_available_stream_id()
        block = encoder.encode(plain + large) + NEWEST * references
        frame = HeadersFrame(stream, block, flags=("END_HEADERS", "END_STREAM"))
        # Not through the connection, which would encode the headers itself; it learns of the stream though.
        self._connection.send_headers(stream, plain, end_stream=True)
        self._connection.clear_outbound_data_buffer()
        self.calls[stream] = RawCall()
        self._socket.sendall(frame.serialize())

    def _head(self, method: str) -> list[tuple[str, str]]:
        return [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", self._authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]

    def send_part(self, stream: int, message: bytes, size: int) -> None:
        """Sends the first bytes of a message and its announced length; the rest never follows."""
        data = PREFIX.pack(0, len(message)) + message
        self._connection.send_data(stream, data[:size])
        self._flush()

    def call(self, method: str, message: bytes, seconds: float = 30) -> int:
        """Makes a whole call, within the server's flow control; does not wait for its answer."""
        stream = self.open(method)
        data, until = memoryview(PREFIX.pack(0, len(message)) + message), time.monotonic() + seconds
        while data:
            room = min(
                self._connection.local_flow_control_window(stream), self._connection.max_outbound_frame_size
            )
            if room:
                self._connection.send_data(stream, bytes(data[:room]), end_stream=room >= len(data))
                data = data[room:]
                self._flush()
            elif self.closed or self.calls[stream].ended_at or time.monotonic() > until:
                break
            else:
                self.receive(0.1)
        return stream

    def receive(self, seconds: float) -> bool:
        """Waits that long for bytes and handles them; returns whether there were any."""
        if self.closed:
            return False
        self._socket.settimeout(max(seconds, 0.001))
        try:
            data = self._socket.recv(READ_BYTES)
        except TimeoutError:
            return False
        except OSError:
            data = b""
        self.closed = self.closed or not data
        if self.closed:
            for call in self.calls.values():
                call.ended_at = call.ended_at or time.monotonic()
            return False
        for event in self._connection.receive_data(self._without_farewell(data)):
            self._handle(event)
        self._flush()
        return True

    def receive_for(self, seconds: float) -> None:
        """Handles what arrives during that time, or until every call has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.open_calls and not self.closed:
            self.receive(min(0.1, until - time.monotonic()))

    @property
    def open_calls(self) -> int:
        """Number of calls that have not ended."""
        return sum(call.ended_at is None for call in self.calls.values())

    def close(self) -> None:
        """Closes the connection without a farewell."""
        self._socket.close()

    def _without_farewell(self, data: bytes) -> bytes:
        """Whole frames, GOAWAY excepted: h2 takes it for the end of the connection, but a drain goes on."""
        self._received += data
        kept, at = bytearray(), 0
        while len(self._received) >= at + FRAME_HEADER_BYTES:
            body = at + FRAME_HEADER_BYTES
            frame, length = Frame.parse_frame_header(memoryview(bytes(self._received[at:body])))
            end = body + length
            if len(self._received) < end:
                break
            if isinstance(frame, GoAwayFrame):
                frame.parse_body(memoryview(bytes(self._received[body:end])))
                self.farewell = f"GOAWAY {frame.error_code}: {frame.additional_data.decode(errors='replace')}"
            else:
                kept += self._received[at:end]
            at = end
        del self._received[:at]
        return bytes(kept)

    def _handle(self, event: object) -> None:
        stream = getattr(event, "stream_id", None)
        call = self.calls.get(stream) if stream else None
        if call is None:
            return
        if isinstance(event, DataReceived):
            call.received += len(event.data)
        elif isinstance(event, ResponseReceived | TrailersReceived):
            status = {str(name): value for name, value in event.headers}.get("grpc-status")
            call.status = call.status if status is None else int(status)
        elif isinstance(event, StreamReset):
            call.reset = event.error_code
        if isinstance(event, StreamEnded | StreamReset):
            call.ended_at = time.monotonic()

    def _flush(self) -> None:
        if data := self._connection.data_to_send():
            try:
                self._socket.settimeout(None)
                self._socket.sendall(data)
            except OSError:  # the server has closed the connection; `receive` notes it
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
