"""How the HTTP process passes the names in its client's certificate on to the gRPC server."""

import json
from collections.abc import Sequence

# Metadata of a call: a JSON list of texts. The server reads it only if the call came through its private
# socket, so that no other caller can claim a name.
KEY = "attention-peer-identities-bin"


def encode(names: Sequence[str]) -> tuple[str, bytes]:
    """The metadata of a call on behalf of a client with these names."""
    return KEY, json.dumps(names).encode()


def decode(value: str | bytes) -> tuple[str, ...]:
    """The names in such a value."""
    return tuple(json.loads(value))
