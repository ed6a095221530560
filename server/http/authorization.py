"""Refuses callers that may not call, before their large bodies are read.

This process knows no tokens: the gRPC server decides. A small body is read and sent on, and refused there.
For one that is or may be large, the gRPC server is asked first; its approval is cached for a second.
"""

import hashlib
import time
from collections.abc import Mapping

from attention_serving.server.access_question import METHOD, question
from attention_serving.server.http.backend import SERVICE, Backend, Metadata
from attention_serving.server.tls import forwarding

# Bodies of more bytes are worth a question.
LARGE_BYTES = 1 << 16
REMEMBERED_SECONDS = 1.0
MAX_REMEMBERED = 1024
TIMEOUT_SECONDS = 10.0
# Metadata that say who calls. Others, such as identifiers of requests and traces, differ from call to call.
CREDENTIALS = ("authorization", forwarding.KEY)


class Authorization:
    """Asks the gRPC server. Belongs to one event loop."""

    def __init__(self, backend: Backend) -> None:
        """Remembers nothing yet.

        Args:
            backend: The gRPC server.
        """
        self._backend = backend
        # Until when an answer holds, in the order of the answers.
        self._allowed: dict[bytes, float] = {}

    async def check(self, metadata: Metadata, rpc: str, model: str) -> None:
        """Checks that the caller may call a method.

        Args:
            metadata: What the call would be made with.
            rpc: Name of the method in the service.
            model: Name of the model; empty if there is none.

        Raises:
            BackendError: It may not.
        """
        credentials = [pair for pair in metadata if pair[0] in CREDENTIALS]
        # Credentials are not kept, only their hash.
        key = hashlib.sha256(repr((credentials, rpc, model)).encode()).digest()
        now = time.monotonic()
        if self._allowed.get(key, 0.0) > now:
            return
        asked = question(f"/{SERVICE}/{rpc}", model)
        await self._backend.call_path(METHOD, asked, metadata, TIMEOUT_SECONDS)
        self._allowed.pop(key, None)
        if len(self._allowed) >= MAX_REMEMBERED:
            del self._allowed[next(iter(self._allowed))]
        self._allowed[key] = now + REMEMBERED_SECONDS


def is_large(headers: Mapping[str, str]) -> bool:
    """Whether the body of a request is large, or of unknown size: sent in chunks, or compressed."""
    length = headers.get("content-length", "")
    if "transfer-encoding" in headers or "content-encoding" in headers:
        return True
    return length.isdecimal() and int(length) > LARGE_BYTES
