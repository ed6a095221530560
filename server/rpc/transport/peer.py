"""Who made a call, as the connection proves it."""

from collections.abc import Iterable, Mapping, Sequence

from attention_serving.server.tls import forwarding

# Properties of gRPC's authentication context: the client's certificate, and what secures the connection.
CERTIFICATE, SECURITY = "x509_pem_cert", "transport_security_type"
# What gRPC calls connections through the private socket: see `RpcServer.bind`.
LOCAL = b"local"


def identities(
    context: Mapping[str, Sequence[bytes]], metadata: Iterable[tuple[str, str | bytes]]
) -> tuple[str, ...]:
    """The names of the client's verified certificate.

    Args:
        context: gRPC's authentication context of the call.
        metadata: The metadata of the call. It is read only if the call is from the HTTP process.
    """
    if certificates := context.get(CERTIFICATE):
        from attention_serving.server.tls import identities as names  # noqa: PLC0415 - its library is needed with TLS only

        return names.of_pem(certificates[0])
    claimed = forwarded(context, metadata, forwarding.KEY)
    return () if claimed is None else forwarding.decode(claimed)


def forwarded(
    context: Mapping[str, Sequence[bytes]], metadata: Iterable[tuple[str, str | bytes]], name: str
) -> str | bytes | None:
    """What the HTTP process says about its client; None if the call is from anybody else.

    Args:
        context: gRPC's authentication context of the call.
        metadata: The metadata of the call.
        name: What is asked for: a key of `server.tls.forwarding`.
    """
    if LOCAL not in context.get(SECURITY, ()):
        return None
    return next((value for key, value in metadata if key == name), None)
