"""Addresses: how they are written, which others can reach, and sockets that are bound to all of a host."""

import errno
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

from attention_serving.server.errors import ServerError

BACKLOG = 1024
# A name's addresses that this machine does not have are skipped, as gRPC does.
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def address_of(host: str, port: int) -> str:
    """HOST:PORT; an IPv6 address, given with or without brackets, has them."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def check_exposure(host: str, *, encrypted: bool, insecure: bool) -> None:
    """Checks the address that a server is to listen on. A Unix domain socket needs no check.

    Args:
        host: Address or host name; IPv6 with or without brackets.
        encrypted: Whether there is a certificate.
        insecure: Whether the operator accepts calls that are not encrypted.

    Raises:
        ServerError: The name has no address; or one is not a loopback address, and is neither encrypted nor
            accepted.
    """
    if encrypted or insecure:
        return
    try:
        entries = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ServerError(f"cannot listen on {host}: {error.strerror}") from error
    if all(_is_loopback(str(address[0])) for *_, address in entries):
        return
    raise ServerError(
        f"{host} can be reached from other machines, and calls would be neither encrypted"
        " nor protected from change: give --tls-certificate and --tls-key, or listen on 127.0.0.1, or allow"
        " it with --insecure (ATTENTION_INSECURE=true), such as behind a proxy that encrypts"
    )


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def listen(host: str, port: int, use: str = "HTTP") -> list[socket.socket]:
    """Listens on every address of a host.

    Connections wait in the operating system's queue until a process accepts them.

    Args:
        host: Address or host name; IPv6 with or without brackets.
        port: 0 selects a free port, the same for all addresses.
        use: What for.

    Raises:
        ServerError: The address is in use, or does not belong to this machine.
    """
    # Connections take the option over: those in TIME_WAIT must not block the port for the next server.
    return _bind_all(host, port, socket.SO_REUSEADDR, use=f" for {use}", backlog=BACKLOG)


def reserve(host: str, port: int) -> list[socket.socket]:
    """Binds a port without listening; only this user's sockets with SO_REUSEPORT can then bind it.

    Until the sockets are closed, several processes can begin to listen on the port, and no other service can.
    Otherwise as `listen`.
    """
    # A socket with SO_REUSEPORT would also join other listeners that set it, such as another server of the
    # same user. A socket without it, bound first, fails if the port is in use.
    for probe in _bind_all(host, port, socket.SO_REUSEADDR):
        probe.close()
    reserved = _bind_all(host, port, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
    # It is needed to bind while old connections of the port are in TIME_WAIT. If it stayed set, another
    # server with SO_REUSEADDR could bind the reserved port.
    for bound in reserved:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return reserved


def _bind_all(host: str, port: int, *options: int, use: str = "", backlog: int = 0) -> list[socket.socket]:
    """Sockets with some options, bound to every address of a host, which listen if there is a backlog."""
    opened: list[socket.socket] = []
    absent = OSError(errno.EADDRNOTAVAIL, "no such address")
    try:
        entries = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        for family, _, _, _, (numeric, _, *scope) in entries:
            chosen = opened[0].getsockname()[1] if opened else port
            try:
                opened.append(_bind(family, (numeric, chosen, *scope), options, backlog))
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                absent = error
        if not opened:
            raise absent
    except OSError as error:
        for bound in opened:
            bound.close()
        raise ServerError(f"cannot listen on {host}:{port}{use}: {error.strerror}") from error
    return opened


def _bind(family: int, address: tuple[Any, ...], options: Iterable[int], backlog: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(address)
        if backlog:
            bound.listen(backlog)
    except OSError:
        bound.close()
        raise
    return bound
