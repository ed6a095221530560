"""The routes as a Starlette router, with the pages: how requests are answered, and errors become answers."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from attention_serving.server.engine.errors import EngineError
from attention_serving.server.http import embeddings
from attention_serving.server.http.exchange import Exchange, Reply, Service, refusal
from attention_serving.server.http.openapi import document
from attention_serving.server.http.routes import ROUTES, Handler
from attention_serving.server.http.schemas import to_json

log = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down; retry on another server"
UNEXPECTED = "the server failed unexpectedly; its log has the details"
CLIENT_LEFT = 499
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
    found: dict[str, dict[str, Handler]] = defaultdict(dict)
    for route in ROUTES:
        for path in route.paths:
            found[path][route.verb] = route.handle
    found["/openapi.json"]["GET"] = _openapi
    found["/docs"]["GET"] = partial(_page, DOCS.read_bytes())
    if service.settings.http_explore:
        found["/explore"]["GET"] = partial(_page, EXPLORER.read_bytes())
        found["/explore/models"]["GET"] = _explorer_models
    routes = [Route(path, Endpoint(service, path, handlers)) for path, handlers in found.items()]
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
            await exchange.reply(await self._handler(scope)(exchange))
        except ClientDisconnect:
            exchange.status = CLIENT_LEFT
        except asyncio.CancelledError:  # the grace has ended
            await self._refuse(exchange, HTTPException(503, SHUTTING_DOWN, {"retry-after": "1"}))
        except HTTPException as error:
            await self._refuse(exchange, error)
        except EngineError as error:
            await self._refuse(exchange, refusal(error))
        except Exception:
            log.exception("request failed", extra={"path": scope["path"]})
            await self._refuse(exchange, HTTPException(500, UNEXPECTED))
        finally:
            exchange.close()

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
        is_openai = self._path.startswith("/v1/")
        json = embeddings.error_json(error) if is_openai else {"error": error.detail}
        await exchange.reply(Reply.of_json(json, error.status_code, headers))


async def _openapi(_exchange: Exchange) -> Reply:
    return Reply.of_json(document())


async def _page(content: bytes, _exchange: Exchange) -> Reply:
    return Reply([content], headers=PAGE_HEADERS)


async def _explorer_models(exchange: Exchange) -> Reply:
    """The models that the caller may read, as attention.v1 describes them."""
    models = await embeddings.list_models(exchange)
    return Reply.of_json({"models": [to_json(model) for model in models]})
