"""Inference: reads the body, decodes, calls the gRPC server, encodes and sends."""

from abc import abstractmethod
from functools import partial

from starlette.requests import Request
from starlette.types import Send

from attention_serving.server.engine.budget import Reservation
from attention_serving.server.http import infer_request, infer_response
from attention_serving.server.http.backend import while_connected
from attention_serving.server.http.body import Body
from attention_serving.server.http.context import Exchange, metadata_of, run
from attention_serving.server.http.infer_request import Decoded, Limits, ModelPath
from attention_serving.server.http.infer_response import HEADER_LENGTH, Encoded

# How much longer than a request's own timeout the call may take: the server reports that it has passed.
TIMEOUT_MARGIN_SECONDS = 1.0
# A response is sent in parts of this size, so that the memory is held until the client has read most of it.
PART_BYTES = 1 << 18


class InferenceExchange(Exchange):
    """A request that the gRPC server computes. It holds memory, and a place once its body has arrived."""

    async def answer(self, request: Request, body: Body, send: Send) -> None:
        """Computes the answer and sends it.

        Raises:
            HttpError: The request was refused, here or by the gRPC server.
            EngineError: The request is wrong, or this process is at its limit.
            ClientDisconnectedError: The client left.
        """
        await self.context.authorize(request, "ModelInfer")
        reservation = self.context.budget.reserve(0)
        try:
            data = await body.read(reservation)
            with self.context.place():  # a body that does not arrive takes none
                await self.compute(request, data, reservation, send)
        finally:
            reservation.release()

    @abstractmethod
    async def compute(self, request: Request, data: bytearray, reservation: Reservation, send: Send) -> None:
        """Computes the answer to a body and sends it; what it takes is added to the reservation."""


class Inference(InferenceExchange):
    """POST .../infer."""

    async def compute(self, request: Request, data: bytearray, reservation: Reservation, send: Send) -> None:
        """Computes the outputs of a model and sends them."""
        await _send(await self._compute(request, data, reservation), send)

    async def _compute(self, request: Request, data: bytearray, reservation: Reservation) -> Encoded:
        decoded = await self._decode(request, data, reservation)
        timeout = decoded.timeout_seconds and decoded.timeout_seconds + TIMEOUT_MARGIN_SECONDS
        call = partial(
            self.context.backend.call, "ModelInfer", decoded.message, metadata_of(request), timeout
        )
        reply = await while_connected(request.receive, call)
        reservation.add(len(reply))
        return await run(len(reply), partial(infer_response.encode, reply, decoded.form, reservation))

    async def _decode(self, request: Request, data: bytearray, reservation: Reservation) -> Decoded:
        options, header = self.context.options, request.headers.get(HEADER_LENGTH)
        model = ModelPath(request.path_params["model"], request.path_params.get("version", ""))
        scratch = self.context.budget.reserve(0)
        limits = Limits(options.max_message_bytes, options.max_in_flight_bytes, reservation, scratch)
        try:
            return await run(len(data), partial(infer_request.decode, data, header, model, limits))
        finally:
            scratch.release()


async def _send(encoded: Encoded, send: Send) -> None:
    headers = [(name.encode(), value.encode()) for name, value in encoded.headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in encoded.parts:
        for at in range(0, len(part), PART_BYTES):
            chunk = part[at : at + PART_BYTES]
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
