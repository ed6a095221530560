"""Refuses to listen on an address that other machines reach, unless calls to it are encrypted."""

import ipaddress
import socket

from attention_serving.server.errors import BindError, ExposureError


def check(host: str, *, encrypted: bool, insecure: bool) -> None:
    """Checks the address that a server is to listen on. A Unix domain socket needs no check.

    Args:
        host: Address or host name; IPv6 with or without brackets.
        encrypted: Whether there is a certificate.
        insecure: Whether the operator accepts calls that are not encrypted.

    Raises:
        ExposureError: It is not a loopback address, and neither encrypted nor accepted.
        BindError: The name has no address.
    """
    if encrypted or insecure or _is_loopback(host):
        return
    raise ExposureError(
        f"{host or 'every address'} can be reached from other machines, and calls would be neither encrypted"
        " nor protected from change: give --tls-certificate and --tls-key, or listen on 127.0.0.1, or accept"
        " it with --insecure (ATTENTION_INSECURE=true), such as behind a proxy that encrypts"
    )


def _is_loopback(host: str) -> bool:
    """Whether every address of a host is a loopback address."""
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise BindError(f"cannot listen on {host}: {error.strerror}") from error
    return all(_is_loopback_address(str(address[0])) for *_, address in found)


def _is_loopback_address(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
