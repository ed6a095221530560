"""Reads the body of a request within limits of size, memory and time."""

import asyncio
import math
import zlib
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus

from starlette.requests import Request

from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.http.errors import ClientDisconnectedError, HttpError, TooLargeError

# How zlib is told the format: gzip, and what HTTP calls deflate.
WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# A compressed body is decompressed in pieces of this size, each of which is reserved.
PIECE_BYTES = 1 << 18
# How long the rest of a refused body is read, so that a client that writes all of it first sees the answer.
DISCARD_SECONDS = 5.0


class Body:
    """The body of one request, which is read once."""

    def __init__(self, request: Request, max_bytes: int, timeout_seconds: float) -> None:
        """Reads nothing yet.

        Args:
            request: The request.
            max_bytes: Size of the largest body, decompressed.
            timeout_seconds: How long it may take to arrive; 0 sets no limit.
        """
        self._receive = request.receive
        self._headers = request.headers
        self._max_bytes = max_bytes
        self._timeout_seconds = timeout_seconds
        self._data = bytearray()
        self._begun = False
        # Nothing is waited for if the request has no body: the refusal of a GET is sent at once.
        self.complete = "transfer-encoding" not in self._headers and not _length(self._headers)

    async def read(self, reservation: Reservation) -> bytearray:
        """Returns the body, decompressed.

        Args:
            reservation: Takes the memory of the body.

        Raises:
            HttpError: The body is too large, too slow, or compressed in an unknown way.
            InvalidRequestError: It cannot be decompressed.
            OverloadedError: The memory is not available.
            ClientDisconnectedError: The client left.
        """
        decoder = self._decoder()
        if _length(self._headers) > self._max_bytes:
            raise self._too_large()
        until = asyncio.get_running_loop().time() + (self._timeout_seconds or math.inf)
        while not self.complete:
            try:
                async with asyncio.timeout_at(None if math.isinf(until) else until):
                    chunk = await self._chunk()
            except TimeoutError:
                message = f"the body did not arrive within {self._timeout_seconds:g} seconds"
                raise HttpError(HTTPStatus.REQUEST_TIMEOUT, message) from None
            if decoder is None:
                self._add(chunk, reservation)
            else:
                await asyncio.to_thread(self._inflate, decoder, chunk, reservation)
        if decoder is not None and not decoder.eof and self._begun_compressed():
            raise InvalidRequestError("Content-Encoding", "the compressed body ends too early")
        return self._data

    async def discard(self) -> None:
        """Reads and drops the rest of a refused body, for a bounded time and size."""
        if not self._begun and self._headers.get("expect", "").lower() == "100-continue":
            return  # the client waits to be asked for the body
        left = self._max_bytes
        with suppress(TimeoutError, ClientDisconnectedError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self.complete and left > 0:
                    left -= len(await self._chunk())

    async def _chunk(self) -> bytes:
        self._begun = True
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        self.complete = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk

    def _inflate(self, decoder: "zlib._Decompress", data: bytes, reservation: Reservation) -> None:
        """Adds what compressed data contain. One of 64 KB may contain 64 MB: too much for the event loop."""
        more = bool(data)
        while more:
            try:
                piece = decoder.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise InvalidRequestError("Content-Encoding", f"the body is damaged: {error}") from None
            self._add(piece, reservation)
            data, more = decoder.unconsumed_tail, len(piece) == PIECE_BYTES
        if decoder.unused_data:
            raise InvalidRequestError("Content-Encoding", "data follow the compressed body")

    def _add(self, chunk: bytes, reservation: Reservation) -> None:
        if len(self._data) + len(chunk) > self._max_bytes:
            raise self._too_large()
        reservation.add(len(chunk))
        self._data += chunk

    def _begun_compressed(self) -> bool:
        return bool(self._data) or int(self._headers.get("content-length", 1)) > 0

    def _decoder(self) -> "zlib._Decompress | None":
        encoding = self._headers.get("content-encoding", "identity").strip().lower()
        if encoding == "identity":
            return None
        if encoding not in WINDOW_BITS:
            message = f"Content-Encoding: is {encoding[:100]!r}; must be gzip, deflate or identity"
            headers = {"accept-encoding": "gzip, deflate, identity"}
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, headers)
        return zlib.decompressobj(WINDOW_BITS[encoding])

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"the body is larger than the limit of {self._max_bytes} bytes")


def _length(headers: Mapping[str, str]) -> int:
    """The size that a request announces; 0 if it announces none."""
    return int(headers.get("content-length", 0))
