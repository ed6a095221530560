"""The page at /explore, which draws attention weights, and the list of models that it shows.

explorer.html is built from clients/explorer, which has its source. Everything else that the page asks for are
the paths that programs use: inference with the output `attention_weights`, and with the caller's own rights.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.http.backend import while_connected
from attention_serving.server.http.body import Body
from attention_serving.server.http.context import Context, Exchange, metadata_of
from attention_serving.server.http.messages import to_json

PATH, MODELS_PATH = "/explore", "/explore/models"
PAGE = Path(__file__).with_name("explorer.html")
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">')
LIST_MODELS = f"/{pb.DESCRIPTOR.services_by_name['AttentionService'].full_name}/ListModels"
TIMEOUT_SECONDS = 10.0


class ExplorerModels(Exchange):
    """GET /explore/models: the models that the caller may read, as attention.v1 describes them."""

    async def answer(self, request: Request, body: Body, send: Send) -> None:  # noqa: ARG002 - has none
        """Asks the gRPC server and sends its list."""
        models = await list_models(self.context, request)
        content = orjson.dumps({"models": [to_json(model) for model in models]})
        await Response(content, media_type="application/json")(request.scope, request.receive, send)


async def list_models(context: Context, request: Request) -> Sequence[pb.Model]:
    """Every version of the models that the caller may read, as the gRPC server describes them.

    Raises:
        BackendError: The caller may not read any, or the gRPC server failed.
        ClientDisconnectedError: The client left.
    """
    call = partial(context.backend.call_path, LIST_MODELS, b"", metadata_of(request), TIMEOUT_SECONDS)
    return pb.ListModelsResponse.FromString(await while_connected(request.receive, call)).models


def explorer_routes(context: Context) -> tuple[Route, ...]:
    """The page and the list of models."""
    content = PAGE.read_bytes()
    headers = page_headers(content.decode())

    async def page(_request: Request) -> Response:
        return Response(content, headers=headers, media_type="text/html; charset=utf-8")

    return (
        Route(PATH, page, methods=["GET"]),
        Route(MODELS_PATH, ExplorerModels(context, MODELS_PATH), methods=["GET"]),
    )


def page_headers(page: str) -> dict[str, str]:
    """Headers of the page: the policy that it states itself, and what only a header can state.

    The policy names the hashes of the page's script and style, and allows requests to this server only.

    Raises:
        ValueError: The page does not state a policy.
    """
    found = POLICY.search(page)
    if found is None:
        raise ValueError(f"{PAGE.name} does not state a content security policy")
    return {
        "content-security-policy": f"{found[1]}; frame-ancestors 'none'",
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
