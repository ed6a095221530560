"""The endpoint /v1/embeddings, as clients of OpenAI's API call it."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from server.engine.budget import Reservation
from server.http import embedding_messages, fields
from server.http.backend import while_connected
from server.http.body import Body
from server.http.context import metadata_of, run
from server.http.errors import CLOSE, HttpError
from server.http.inference import InferenceExchange

PATH = "/v1/embeddings"
JSON = "application/json"


class Embeddings(InferenceExchange):
    """POST /v1/embeddings."""

    async def compute(self, request: Request, body: Body, reservation: Reservation, send: Send) -> None:
        """Computes the embeddings of texts and sends them."""
        response = Response(await self._compute(request, body, reservation), media_type=JSON)
        await response(request.scope, request.receive, send)

    def page(self, error: HttpError, *, close: bool) -> Response:
        """An error in the form of OpenAI's API."""
        headers = {**error.headers, **(CLOSE if close else {})}
        return Response(embedding_messages.error_body(error), error.status, headers, JSON)

    async def _compute(self, request: Request, body: Body, reservation: Reservation) -> bytes:
        options, data = self.context.options, await body.read(reservation)
        scratch = self.context.budget.reserve(0)
        try:
            scratch.add(fields.check_memory(data, options.max_in_flight_bytes))
            decode = partial(embedding_messages.decode, data, options.max_message_bytes)
            decoded = await run(len(data), decode)
        finally:
            scratch.release()
        reservation.add(len(decoded.message))
        call = partial(self.context.backend.call, "ModelInfer", decoded.message, metadata_of(request), None)
        reply = await while_connected(request.receive, call)
        reservation.add(len(reply))
        return await run(len(reply), partial(embedding_messages.encode, reply, decoded, reservation))
