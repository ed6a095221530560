"""A web service on asyncio that embeds texts on an attention server.

    python -m examples.asyncio_service --server 127.0.0.1:8001 --model my-bert
    curl --json '{"texts": ["Life is short", "eat dessert first"]}' http://127.0.0.1:8080/embed

- All requests share one AsyncAttentionClient, which is opened and closed with the application.
- 504 if the server does not answer within `--timeout`.
- 503 with Retry-After if the server is overloaded or absent. Its limits are those of the service.
- After SIGTERM and SIGINT, requests in progress have `--grace` seconds to end.

Exit status: 0 after a signal; otherwise that of uvicorn.
"""

import argparse
import math
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from attention_client import (
    AsyncAttentionClient,
    AttentionClientError,
    DeadlineExceededError,
    InvalidArgumentError,
    OverloadedError,
    UnavailableError,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

# The first class that an error belongs to decides its status.
STATUSES = {
    OverloadedError: HTTPStatus.SERVICE_UNAVAILABLE,
    UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineExceededError: HTTPStatus.GATEWAY_TIMEOUT,
    InvalidArgumentError: HTTPStatus.BAD_REQUEST,
}


def make_app(server: str, model: str, timeout: float) -> Starlette:
    """The application: POST /embed takes {"texts": [...]}, and GET /ready asks for the server's health."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with AsyncAttentionClient(server, timeout=timeout, wait_for_ready=False) as client:
            yield {"client": client}

    async def embed(request: Request) -> JSONResponse:
        try:
            texts = (await request.json())["texts"]
        except (ValueError, KeyError, TypeError):
            texts = None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return JSONResponse({"error": 'send {"texts": [...]}, a list of texts'}, HTTPStatus.BAD_REQUEST)
        embeddings = await request.state.client.embed(model, texts)
        return JSONResponse({"embeddings": embeddings.tolist()})

    async def ready(request: Request) -> JSONResponse:
        is_ready = await request.state.client.is_ready()
        return JSONResponse({"ready": is_ready}, 200 if is_ready else HTTPStatus.SERVICE_UNAVAILABLE)

    routes = [Route("/embed", embed, methods=["POST"]), Route("/ready", ready)]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={AttentionClientError: failed})


async def failed(_: Request, error: Exception) -> JSONResponse:
    """The answer to a request whose call failed."""
    statuses = (status for kind, status in STATUSES.items() if isinstance(error, kind))
    status = next(statuses, HTTPStatus.BAD_GATEWAY)
    headers = {}
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = str(max(1, math.ceil(getattr(error, "retry_after", None) or 0)))
    return JSONResponse({"error": str(error)}, status, headers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until a signal, and returns the exit status."""
    parser = argparse.ArgumentParser(description="A web service that embeds texts on an attention server.")
    parser.add_argument("--server", default="127.0.0.1:8001", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--model", required=True, help="name of a text encoder")
    parser.add_argument("--timeout", type=float, default=10, help="seconds of a call (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="0: any free port (default: %(default)s)")
    parser.add_argument("--grace", type=int, default=30, help="seconds to end within (default: %(default)s)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again once it has ended
    app = make_app(options.server, options.model, options.timeout)
    uvicorn.run(app, port=options.port, timeout_graceful_shutdown=options.grace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
