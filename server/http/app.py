"""The routes, as a Starlette router: how a request is answered, and how errors become answers."""

import asyncio
import logging
import math
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import Code, EngineError, OverloadedError
from attention_serving.server.http import embeddings, schemas
from attention_serving.server.http.exchange import Exchange, Reply, Service
from attention_serving.server.http.infer import infer
from attention_serving.server.http.methods import INFER_PATHS, METHODS, Method, to_json
from attention_serving.server.http.openapi import document
from attention_serving.server.http.options import HttpOptions
from attention_serving.server.http.schemas import Body

log = logging.getLogger(__name__)
Handler: TypeAlias = "Callable[[Exchange], Awaitable[Reply]]"
# The JSON of an error.
ErrorJson: TypeAlias = "Callable[[HTTPException], Any]"
# By path and verb.
Routes: TypeAlias = "Mapping[str, Mapping[str, Handler]]"

SHUTTING_DOWN = "the server is shutting down; retry on another server"
UNEXPECTED = "the server failed unexpectedly; its log has the details"
CLIENT_LEFT = 499
HTML = "text/html; charset=utf-8"
DOCS, EXPLORER = (Path(__file__).with_name(name) for name in ("docs.html", "explorer.html"))
# The page loads nothing but this server's own description.
DOCS_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'",
    "x-content-type-options": "nosniff",
}
# The policy that the explorer states itself: the hashes of its script and style, and this server only.
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">')


def create_application(options: HttpOptions) -> Router:
    """The application of one process. It connects to the gRPC server when its lifespan begins.

    Args:
        options: Where the gRPC server is, and how much is taken from the network.
    """

    # The channels belong to the event loop, and are made in it.
    @asynccontextmanager
    async def lifespan(_application: object) -> AsyncIterator[None]:
        service = Service(options)
        for path, handlers in routes(explore=options.explore).items():
            error_json = embeddings.error_json if path.startswith("/v1/") else _error_json
            router.routes.append(Route(path, Endpoint(service, path, handlers, error_json)))
        router.default = Endpoint(service, "", {}, _error_json)
        yield
        await service.backend.close()
        await asyncio.to_thread(service.recorder.close)

    router = Router(lifespan=lifespan, redirect_slashes=False)
    return router


def routes(*, explore: bool) -> Routes:
    """Every path, with what answers each of its verbs; the first path that fits is taken."""
    found: dict[str, dict[str, Handler]] = defaultdict(dict)
    for path in INFER_PATHS:
        found[path]["POST"] = infer
    for method in METHODS:
        for path in method.paths:
            found[path][method.verb] = partial(_call, method)
    found[embeddings.PATH]["POST"] = embeddings.embed
    for path in embeddings.MODEL_PATHS:
        found[path]["GET"] = embeddings.models
    found["/openapi.json"]["GET"] = _openapi
    found["/docs"]["GET"] = partial(_page, DOCS.read_bytes(), DOCS_HEADERS)
    if explore:
        page = EXPLORER.read_bytes()
        found["/explore"]["GET"] = partial(_page, page, explorer_headers(page.decode()))
        found["/explore/models"]["GET"] = _explorer_models
    return found


class Endpoint:
    """Answers the requests of one path, as an ASGI application: errors become answers, nothing escapes."""

    def __init__(
        self, service: Service, path: str, handlers: Mapping[str, Handler], error_json: ErrorJson
    ) -> None:
        """Creates the endpoint of a path, in which names of parameters are in braces.

        Args:
            service: What all requests share.
            path: The path; empty for all that there are not.
            handlers: What answers each verb.
            error_json: The form of errors.
        """
        self._service, self._path, self._error_json = service, path, error_json
        self._handlers = {**({"HEAD": handlers["GET"]} if "GET" in handlers else {}), **handlers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        scope.setdefault("path_params", {})
        exchange = Exchange(self._service, scope, receive, send, self._path)
        try:
            await self._answer(exchange)
        finally:
            exchange.close()

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await exchange.reply(await self._handler(exchange.scope)(exchange))
        except ClientDisconnect:
            exchange.status = CLIENT_LEFT
        except asyncio.CancelledError:  # the grace has ended
            await self._refuse(exchange, HTTPException(503, SHUTTING_DOWN, {"retry-after": "1"}))
        except HTTPException as error:
            await self._refuse(exchange, error)
        except EngineError as error:
            await self._refuse(exchange, _of_engine(error))
        except Exception:
            log.exception("request failed", extra={"path": exchange.scope["path"]})
            await self._refuse(exchange, HTTPException(500, UNEXPECTED))

    def _handler(self, scope: Scope) -> Handler:
        verb, path = scope["method"], scope["path"][:200]
        if verb in self._handlers:
            return self._handlers[verb]
        if not self._handlers:
            raise HTTPException(404, f"{path}: there is no such path; /docs lists them")
        allowed = ", ".join(sorted(self._handlers))
        raise HTTPException(405, f"{path}: the method is {verb[:20]}; must be {allowed}", {"allow": allowed})

    async def _refuse(self, exchange: Exchange, error: HTTPException) -> None:
        if exchange.status:  # an answer has begun; the connection ends without its end
            raise error
        if not exchange.body_complete and error.status_code != HTTPStatus.REQUEST_TIMEOUT:
            await exchange.discard()
        headers = {**(error.headers or {}), **({} if exchange.body_complete else {"connection": "close"})}
        json = orjson.dumps(self._error_json(error))
        await exchange.reply(Reply([json], error.status_code, headers=headers))


def _of_engine(error: EngineError) -> HTTPException:
    """The answer to a request that this process refuses itself."""
    if isinstance(error, OverloadedError):
        seconds = max(1, math.ceil(error.retry_after))
        return HTTPException(503, error.message, {"retry-after": str(seconds)})
    return HTTPException(400 if error.code is Code.INVALID_ARGUMENT else 500, error.message)


def _error_json(error: HTTPException) -> dict[str, str]:
    return {"error": error.detail}


async def _call(method: Method, exchange: Exchange) -> Reply:
    """Calls a method of the table."""
    if method.body is None:
        message = method.message(exchange.parameters, None)
    else:
        await exchange.authorize(method.full_name)
        message = await exchange.decoded(await exchange.read(), partial(_message, method, exchange))
    json, status = method.reply(await exchange.call(method.full_name, message, method.timeout_seconds))
    return Reply([orjson.dumps(json)], status)


def _message(method: Method, exchange: Exchange, data: bytearray, scratch: Reservation) -> bytes:
    schemas.reserve(data, exchange.service.options.max_in_flight_bytes, scratch)
    return method.message(exchange.parameters, schemas.parse(data, method.body or Body))


async def _openapi(_exchange: Exchange) -> Reply:
    return Reply([orjson.dumps(document(), option=orjson.OPT_INDENT_2)])


async def _page(content: bytes, headers: Mapping[str, str], _exchange: Exchange) -> Reply:
    return Reply([content], media_type=HTML, headers=headers)


async def _explorer_models(exchange: Exchange) -> Reply:
    """The models that the caller may read, as attention.v1 describes them."""
    models = await embeddings.list_models(exchange)
    return Reply([orjson.dumps({"models": [to_json(model) for model in models]})])


def explorer_headers(page: str) -> dict[str, str]:
    """Headers of the explorer: the policy that it states itself, and what only a header can state.

    Raises:
        ValueError: The page does not state a policy.
    """
    found = POLICY.search(page)
    if found is None:
        raise ValueError(f"{EXPLORER.name} does not state a content security policy")
    return {
        "content-security-policy": f"{found[1]}; frame-ancestors 'none'",
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
