"""The sockets of the HTTP port."""

import errno
import socket

from attention_serving.server.errors import BindError

BACKLOG = 1024
# A name's addresses that this machine does not have are skipped, as gRPC does.
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen(host: str, port: int) -> list[socket.socket]:
    """Listens on every address of a host.

    Connections wait in the operating system's queue until a process accepts them.

    Args:
        host: Address or host name; IPv6 with or without brackets.
        port: 0 selects a free port, the same for all addresses.

    Raises:
        BindError: The address is in use, or does not belong to this machine.
    """
    opened: list[socket.socket] = []
    absent = OSError(errno.EADDRNOTAVAIL, "no such address")
    try:
        for family, _, _, _, address in _addresses(host.strip("[]"), port):
            chosen = opened[0].getsockname()[1] if opened else port
            try:
                opened.append(_listen(family, (address[0], chosen, *address[2:])))
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                absent = error
        if not opened:
            raise absent
    except OSError as error:
        for each in opened:
            each.close()
        raise BindError(f"cannot listen on {host}:{port} for HTTP: {error.strerror}") from error
    return opened


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, int, int, str, tuple[object, ...]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, kind, number, name, tuple(address)) for family, kind, number, name, address in found]


def _listen(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    # The address of all interfaces takes both families, as gRPC's does.
    dual = family is socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=dual)
