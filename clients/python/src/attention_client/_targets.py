"""Reads the addresses of one or several servers and translates them into gRPC's notation."""

import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import TypeAlias

from attention_client._validation import whole_number
from attention_client.errors import UnavailableError, invalid

Targets: TypeAlias = str | Sequence[str]
_PORT = re.compile(r"[0-9]{1,5}")
# How the targets begin that gRPC resolves by a scheme; all others are HOST:PORT.
_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:", "xds:")
_FAMILIES = ((socket.AF_INET, "ipv4:", "{}:{}"), (socket.AF_INET6, "ipv6:", "[{}]:{}"))


def read_targets(target: Targets) -> tuple[str, ...]:
    """One target, HOST:PORT or with a scheme that gRPC resolves; or several of HOST:PORT.

    Raises:
        InvalidArgumentError: There is none, or one is neither of them.
    """
    targets = (target,) if isinstance(target, str) else tuple(target) if isinstance(target, Sequence) else ()
    if not targets or not all(isinstance(item, str) and item.strip() for item in targets):
        raise invalid("target", "HOST:PORT or a list of HOST:PORT", repr(target))
    for item in targets:
        if len(targets) > 1 or not item.startswith(_SCHEMES):
            _split(item)
    return targets


def resolve(targets: Sequence[str]) -> str:
    """One gRPC target for several servers, whose names are resolved now: gRPC itself resolves one name only.

    Raises:
        UnavailableError: A name cannot be resolved.
        InvalidArgumentError: Some have IPv4 addresses only, others IPv6 addresses only.
    """
    found = [addresses_of(target) for target in targets]
    for family, scheme, _ in _FAMILIES:
        if all(own[family] for own in found):
            addresses = dict.fromkeys(address for own in found for address in own[family])
            return scheme + ",".join(addresses)
    raise invalid("target", "targets that all have IPv4 or all have IPv6 addresses", list(targets))


def is_local(target: str) -> bool:
    """Whether a connection to the target stays on this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    address = re.sub(r"^(ipv4|ipv6|dns):(.*/)?", "", target)
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _split(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not _PORT.fullmatch(port) or "/" in host or (":" in host and not bracketed):
        raise invalid("target", "HOST:PORT", repr(target))
    return host.strip("[]"), whole_number("target", int(port), 1, 65_535)


def addresses_of(target: str) -> dict[socket.AddressFamily, list[str]]:
    """The addresses of a HOST:PORT, each with its port, by their family.

    Raises:
        InvalidArgumentError: It is not HOST:PORT.
        UnavailableError: The name cannot be resolved.
    """
    host, port = _split(target)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"{target}: {error}", field="target") from error
    return {
        family: [form.format(*address[:2]) for kind, *_, address in found if kind is family]
        for family, _, form in _FAMILIES
    }
