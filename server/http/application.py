"""The routes, as a Starlette application."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from attention_serving.server.http import errors, fields
from attention_serving.server.http.backend import Backend, while_connected
from attention_serving.server.http.body import Body
from attention_serving.server.http.context import Context, Exchange, metadata_of, run
from attention_serving.server.http.embeddings import MODEL_PATHS, Embeddings, EncoderModels
from attention_serving.server.http.embeddings import PATH as EMBEDDINGS
from attention_serving.server.http.errors import HttpError
from attention_serving.server.http.explorer import explorer_routes
from attention_serving.server.http.inference import Inference
from attention_serving.server.http.methods import INFER_PATHS, METHODS, Method
from attention_serving.server.http.observation import Observer
from attention_serving.server.http.openapi import document
from attention_serving.server.http.options import HttpOptions

JSON = "application/json"
PAGE = Path(__file__).with_name("docs.html")
# The page loads nothing but this server's own description.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'",
    "x-content-type-options": "nosniff",
}


class Call(Exchange):
    """One path of the methods other than inference."""

    def __init__(self, context: Context, path: str, methods: Mapping[str, Method]) -> None:
        """Creates the endpoint.

        Args:
            context: What all endpoints share.
            path: The path, with names of parameters in braces.
            methods: The methods of the path by their verbs.
        """
        super().__init__(context, path)
        self._methods = methods

    async def answer(self, request: Request, body: Body, send: Send) -> None:
        """Calls the method and sends its reply."""
        method = self._methods["GET" if request.method == "HEAD" else request.method]
        if method.verb != "GET":
            await self.context.authorize(request, method.rpc)
        reservation = self.context.budget.reserve(0)
        try:
            data = bytearray() if method.verb == "GET" else await body.read(reservation)
            check = partial(fields.check_memory, data, self.context.options.max_in_flight_bytes)
            reservation.add(await run(len(data), check))
            parsed = await run(len(data), partial(fields.parse, data))
            message = method.request(dict(request.path_params), parsed).SerializeToString()
            metadata = metadata_of(request)
            call = partial(self.context.backend.call, method.rpc, message, metadata, method.timeout_seconds)
            reply = method.reply(await while_connected(request.receive, call))
        finally:
            reservation.release()
        response = Response(orjson.dumps(method.answer(reply)), method.status(reply), media_type=JSON)
        await response(request.scope, request.receive, send)


def create_application(options: HttpOptions) -> Starlette:
    """The application of one process. It connects to the gRPC server when its lifespan begins.

    Args:
        options: Where the gRPC server is, and how much is taken from the network.
    """

    # The channels belong to the event loop, and are made in it.
    @asynccontextmanager
    async def lifespan(application: Starlette) -> AsyncIterator[None]:
        backend = Backend(options)
        observer = Observer(options)
        application.router.routes.extend(_routes(Context(options, backend, observer)))
        yield
        await backend.close()
        await asyncio.to_thread(observer.close)

    application = Starlette(lifespan=lifespan, exception_handlers={HTTPException: _not_routed})
    application.router.redirect_slashes = False
    return application


def _routes(context: Context) -> list[Route]:
    by_path: dict[str, dict[str, Method]] = defaultdict(dict)
    for method in METHODS:
        for path in method.paths:
            by_path[path][method.verb] = method
    return [
        *(Route(path, Inference(context, path), methods=["POST"]) for path in INFER_PATHS),
        *(
            Route(path, Call(context, path, methods), methods=list(methods))
            for path, methods in by_path.items()
        ),
        Route(EMBEDDINGS, Embeddings(context, EMBEDDINGS), methods=["POST"]),
        *(Route(path, EncoderModels(context, path), methods=["GET"]) for path in MODEL_PATHS),
        Route("/openapi.json", _described, methods=["GET"]),
        Route("/docs", _page, methods=["GET"]),
        *(explorer_routes(context) if context.options.explore else ()),
    ]


async def _described(_request: Request) -> Response:
    return Response(orjson.dumps(document(), option=orjson.OPT_INDENT_2), media_type=JSON)


async def _page(_request: Request) -> Response:
    return Response(PAGE.read_bytes(), headers=PAGE_HEADERS, media_type="text/html; charset=utf-8")


async def _not_routed(request: Request, error: Exception) -> Response:
    """The answer to a path or a method that no route has."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict((isinstance(error, HTTPException) and error.headers) or {})
    path = request.url.path[:200]
    message = f"{path}: there is no such path; /docs lists them"
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        # The library gives them in the order of a set, which differs from process to process.
        headers["Allow"] = ", ".join(sorted(headers.get("Allow", "").split(", ")))
        message = f"{path}: the method is {request.method[:20]}; must be {headers['Allow']}"
    return errors.page(HttpError(status, message, headers))
