"""How the HTTP process passes on to the gRPC server who its client is: certificate and connection."""

import json
from collections.abc import Sequence

# Metadata of a call: the names in the certificate, as a JSON list of texts, and the connection, as
# ADDRESS:PORT. The server reads them only if the call came through its private socket: no other caller can
# claim them.
KEY, CLIENT = "attention-peer-identities-bin", "attention-client"


def encode(names: Sequence[str]) -> tuple[str, bytes]:
    """The metadata of a call on behalf of a client with these names."""
    return KEY, json.dumps(names).encode()


def decode(value: str | bytes) -> tuple[str, ...]:
    """The names in such a value."""
    return tuple(json.loads(value))
