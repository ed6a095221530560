"""The routes as a Starlette router, with the pages: how requests are answered, and errors become answers."""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from attention_serving.server.engine.errors import EngineError, OverloadedError
from attention_serving.server.http import text_models
from attention_serving.server.http.exchange import REFUSED_WITH, Exchange, Reply, Service
from attention_serving.server.http.openapi import document
from attention_serving.server.http.routes import ROUTES, Handler
from attention_serving.server.http.schemas import to_json

log = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down; retry on another server"
UNEXPECTED = "the server failed unexpectedly; its log has the details"
CLIENT_LEFT = 499
# gRPC codes, by the status that clients of HTTP know for the same. Source: google/rpc/code.proto.
STATUSES = {
    **dict.fromkeys(("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE"), 400),
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    **dict.fromkeys(("ABORTED", "ALREADY_EXISTS"), 409),
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
DOCS = Path(__file__).with_name("docs.html")
# A checkout has the page in the client's distribution, from which the build of this one copies it.
EXPLORER = Path(__file__).with_name("explorer.html")
if not EXPLORER.exists():
    EXPLORER = Path(__file__).parents[3] / "clients/python/src/attention_client/_explorer.html"
# What a page may load is in its own policy. Here is what only a header can state.
PAGE_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def create_application(service: Service) -> Router:
    """The application of one process."""
    table: dict[str, dict[str, Handler]] = defaultdict(dict)
    for route in ROUTES:
        for path in route.paths:
            table[path][route.verb] = route.handle
    table["/openapi.json"]["GET"] = _openapi
    table["/docs"]["GET"] = partial(_page, DOCS.read_bytes())
    if service.settings.http_explore:
        table["/explore"]["GET"] = partial(_page, EXPLORER.read_bytes())
        table["/explore/models"]["GET"] = _explorer_models
    routes = [Route(path, Endpoint(service, path, handlers)) for path, handlers in table.items()]
    return Router(routes, redirect_slashes=False, default=Endpoint(service, "", {}))


class Endpoint:
    """Answers the requests of one path, as an ASGI application: errors become answers, nothing escapes."""

    def __init__(self, service: Service, path: str, handlers: Mapping[str, Handler]) -> None:
        """Creates the endpoint of a path, in which names of parameters are in braces.

        Args:
            service: What all requests share.
            path: The path; empty for all that there are not.
            handlers: What answers each verb.
        """
        self._service, self._path = service, path
        self._handlers = {**({"HEAD": handlers["GET"]} if "GET" in handlers else {}), **handlers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        exchange = Exchange(self._service, scope, receive, send, self._path)
        try:
            await exchange.reply(await self._reply(exchange))
        except ClientDisconnect:
            exchange.status = scope.get(REFUSED_WITH, CLIENT_LEFT)
        finally:
            exchange.close()

    async def _reply(self, exchange: Exchange) -> Reply:
        try:
            return await self._handler(exchange.scope)(exchange)
        except ClientDisconnect:
            raise
        except (Exception, asyncio.CancelledError) as error:
            refusal = self._refusal(error)
        if not exchange.body_has_arrived:
            await exchange.discard()
        headers = dict(refusal.headers or {}) | ({} if exchange.body_has_arrived else {"connection": "close"})
        json = text_models.error_json(refusal, exchange.scope["path"])
        return Reply.of_json(json, refusal.status_code, headers)

    def _handler(self, scope: Scope) -> Handler:
        verb, path = scope["method"], scope["path"][:200]
        if verb in self._handlers:
            return self._handlers[verb]
        if not self._handlers:
            raise HTTPException(404, f"{path}: there is no such path; /docs lists them")
        allowed = ", ".join(sorted(self._handlers))
        raise HTTPException(405, f"{path}: the method is {verb[:20]}; must be {allowed}", {"allow": allowed})

    def _refusal(self, error: BaseException) -> HTTPException:
        retry_seconds = 1.0
        if isinstance(error, EngineError):
            self._service.refusals[error.reason] += 1
        match error:
            case HTTPException():
                return error
            case grpc.aio.AioRpcError():
                status, message = STATUSES.get(error.code().name, 500), error.details() or error.code().name
                retry_seconds = _retry_seconds(error)
            case OverloadedError():
                status, message, retry_seconds = 503, error.message, error.retry_after
            case EngineError():
                status, message = STATUSES.get(error.code.name, 500), error.message
            case asyncio.CancelledError():  # the grace has ended
                status, message = 503, SHUTTING_DOWN
            case _:
                log.exception("request failed", extra={"route": self._path})
                status, message = 500, UNEXPECTED
        retry = {"retry-after": str(max(1, math.ceil(retry_seconds)))}
        headers = {401: {"www-authenticate": "Bearer"}, 429: retry, 503: retry}
        return HTTPException(status, message, headers.get(status))


def _retry_seconds(error: grpc.aio.AioRpcError) -> float:
    """The seconds of google.rpc.RetryInfo; 0 without it."""
    retry = error_details_pb2.RetryInfo()
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except (ValueError, DecodeError):  # the details contradict the status
        return 0
    for detail in status.details if status else ():
        detail.Unpack(retry)
    return float(retry.retry_delay.ToMicroseconds() / 1e6)


async def _openapi(_exchange: Exchange) -> Reply:
    return Reply.of_json(document())


async def _page(content: bytes, _exchange: Exchange) -> Reply:
    return Reply([content], headers=PAGE_HEADERS)


async def _explorer_models(exchange: Exchange) -> Reply:
    """The models that the caller may read, as attention.v1 describes them."""
    models = await text_models.list_models(exchange)
    return Reply.of_json({"models": [to_json(model) for model in models]})
