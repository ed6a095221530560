"""Addresses of servers."""

import socket

from attention_client.enrich.errors import EnrichError

MAX_PORT = 65535


def resolve(target: str) -> list[str]:
    """Every address of a host name, each as HOST:PORT.

    Args:
        target: HOST:PORT; any other gRPC target, such as unix:/PATH, is returned as it is.

    Raises:
        EnrichError: The host name is unknown.
    """
    host, separator, port = target.rpartition(":")
    if not separator or not port.isdigit() or "/" in target:
        return [target]
    if int(port) > MAX_PORT:
        raise EnrichError(f"{target}: the port must be at most {MAX_PORT}")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise EnrichError(
            f"{target} cannot be resolved: {getattr(error, 'strerror', None) or error}"
        ) from error
    addresses = {str(address[0]) for *_, address in found}
    # localhost is one server with two addresses.
    if addresses <= {"127.0.0.1", "::1"}:
        return [target]
    return sorted(f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address in addresses)
