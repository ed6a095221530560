"""Who made a call, as the connection proves it."""

import json
from collections.abc import Iterable, Mapping, Sequence

# Properties of gRPC's authentication context: the client's certificate, and what secures the connection.
CERTIFICATE, SECURITY = "x509_pem_cert", "transport_security_type"
# What gRPC calls connections through the private socket: see `RpcServer.bind`.
LOCAL = b"local"
# Metadata with which the HTTP process passes on the names of its client: a JSON list of texts.
FORWARDED = "attention-peer-identities-bin"


def identities(
    context: Mapping[str, Sequence[bytes]], metadata: Iterable[tuple[str, str | bytes]]
) -> tuple[str, ...]:
    """The names of the client's verified certificate.

    Args:
        context: gRPC's authentication context of the call.
        metadata: The metadata of the call. It is read only if the call is from the HTTP process.
    """
    if certificates := context.get(CERTIFICATE):
        from server.tls import identities as names  # noqa: PLC0415 - its library is needed with TLS only

        return names.of_pem(certificates[0])
    if LOCAL in context.get(SECURITY, ()):
        return _forwarded(metadata)
    return ()


def _forwarded(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[str, ...]:
    for key, value in metadata:
        if key == FORWARDED:
            return tuple(json.loads(value))
    return ()


def forwarded(names: Sequence[str]) -> tuple[str, bytes]:
    """The metadata that passes names on, for the HTTP process."""
    return FORWARDED, json.dumps(names).encode()
