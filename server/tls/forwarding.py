"""How the HTTP process passes on to the gRPC server who its client is: certificate and connection."""

import json
from collections.abc import Iterable, Mapping, Sequence

# Metadata of a call: the names in the certificate, as a JSON list of texts, and the connection, as
# ADDRESS:PORT. The server reads them only if the call came through its private socket: no other caller can
# claim them.
KEY, CLIENT = "attention-peer-identities-bin", "attention-client"
# The property of gRPC's authentication context that says what secures a connection, and what it says of those
# through the private socket: see `RpcServer.bind`.
SECURITY, LOCAL = "transport_security_type", b"local"


def encode(names: Sequence[str]) -> tuple[str, bytes]:
    """The metadata of a call on behalf of a client with these names."""
    return KEY, json.dumps(names).encode()


def decode(value: str | bytes) -> tuple[str, ...]:
    """The names in such a value."""
    return tuple(json.loads(value))


def claimed(
    context: Mapping[str, Sequence[bytes]], metadata: Iterable[tuple[str, str | bytes]], name: str
) -> str | bytes | None:
    """What the HTTP process says about its client; None if the call is from anybody else.

    Args:
        context: gRPC's authentication context of the call.
        metadata: The metadata of the call. It is read only if the call is from the HTTP process.
        name: What is asked for: a key above.
    """
    if LOCAL not in context.get(SECURITY, ()):
        return None
    return next((value for key, value in metadata if key == name), None)
