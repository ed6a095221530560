"""The endpoints /v1/embeddings and /v1/models, as clients of OpenAI's API call them."""

from functools import partial
from http import HTTPStatus

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from attention_serving.protos.attention.v1.attention_pb2 import DESCRIPTOR
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.http import embedding_messages, fields
from attention_serving.server.http.backend import while_connected
from attention_serving.server.http.body import Body
from attention_serving.server.http.context import Exchange, metadata_of, run
from attention_serving.server.http.errors import CLOSE, BackendError, HttpError
from attention_serving.server.http.explorer import list_models
from attention_serving.server.http.inference import InferenceExchange

PATH, MODEL_PATHS = "/v1/embeddings", ("/v1/models", "/v1/models/{model}")
JSON = "application/json"
ATTEND = f"/{DESCRIPTOR.services_by_name['AttentionService'].full_name}/Attend"


class OpenAiExchange(Exchange):
    """A request of OpenAI's API, whose errors have a form of their own."""

    def page(self, error: HttpError, *, close: bool) -> Response:
        """An error in the form of OpenAI's API."""
        headers = {**error.headers, **(CLOSE if close else {})}
        return Response(embedding_messages.error_body(error), error.status, headers, JSON)


class EncoderModels(OpenAiExchange):
    """GET /v1/models and /v1/models/{model}: the ready text encoders that the caller may read."""

    async def answer(self, request: Request, body: Body, send: Send) -> None:  # noqa: ARG002 - has none
        """Sends the list, or one model of it.

        Raises:
            HttpError: The requested model is not a text encoder that is ready.
        """
        models = await list_models(self.context, request)
        encoders = embedding_messages.encoders(models)
        name = request.path_params.get("model")
        if name is not None and name not in encoders:
            message = f"model: {name[:100]!r} is not a text encoder that is ready; GET /v1/models lists them"
            raise HttpError(HTTPStatus.NOT_FOUND, message)
        found = {"object": "list", "data": list(encoders.values())} if name is None else encoders[name]
        response = Response(orjson.dumps(found), media_type=JSON)
        await response(request.scope, request.receive, send)


class Embeddings(OpenAiExchange, InferenceExchange):
    """POST /v1/embeddings."""

    async def compute(self, request: Request, data: bytearray, reservation: Reservation, send: Send) -> None:
        """Computes the embeddings of texts and sends them."""
        response = Response(await self._compute(request, data, reservation), media_type=JSON)
        await response(request.scope, request.receive, send)

    async def _compute(self, request: Request, data: bytearray, reservation: Reservation) -> bytes:
        options = self.context.options
        scratch = self.context.budget.reserve(0)
        try:
            check = partial(fields.check_memory, data, options.max_in_flight_bytes)
            scratch.add(await run(len(data), check))
            decoded = await run(len(data), partial(embedding_messages.decode, data))
        finally:
            scratch.release()
        reservation.add(len(decoded.message))
        call = partial(
            self.context.backend.call_path, ATTEND, decoded.message, metadata_of(request), timeout=None
        )
        try:
            reply = await while_connected(request.receive, call)
        except BackendError as error:
            raise embedding_messages.of_refusal(error, decoded.model) from error
        reservation.add(len(reply))
        return await run(len(reply), partial(embedding_messages.encode, reply, decoded, reservation))
