"""Validates a client's settings and translates them into gRPC's: targets, channel options and metadata.

Retries, load balancing and waiting for a server are gRPC's own, configured by a service config.
"""

import ipaddress
import json
import math
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any, Literal, TypeAlias
from urllib.request import proxy_bypass

import grpc

from attention_client._connection.tls import TlsFiles
from attention_client._values import type_name, whole_number
from attention_client.errors import UnavailableError, invalid

DEFAULT_TARGET = "127.0.0.1:8001"
DEFAULT_TIMEOUT = 30.0
DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# gRPC makes at most five attempts of a call.
MAX_RETRIES = 4
_CHANNEL_OPTIONS = {
    # By default gRPC waits between 1 s and 2 min before it reconnects; a server restarts much faster. It also
    # waits 20 s for an attempt to connect, such as one to a host that drops packets while it starts.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 2_000,
    "grpc.min_reconnect_backoff_ms": 5_000,
    # Without it, gRPC ignores the time limit of an attempt in the service config.
    "grpc.experimental.enable_hedging": 1,
    # By default gRPC asks for the addresses of a name at most every 30 s; an upgrade replaces servers faster.
    "grpc.dns_min_time_between_resolutions_ms": 2_000,
    # A frozen process keeps its connections open: only an unanswered ping shows that it does not serve.
    # Servers allow a ping every 10 s. gRPC's core would stop to ping after two without data, and waits a
    # minute for the answer to a ping, whatever the timeout of keepalive is.
    "grpc.keepalive_time_ms": 15_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.http2.ping_timeout_ms": 5_000,
    "grpc.http2.max_pings_without_data": 0,
}
# Backoff of retries; gRPC varies each pause by a random factor, so that clients do not retry in step.
_RETRY_POLICY = {
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_SERVICE = "attention.v1.AttentionService"
_CONTEXT_METHODS = ("PutContext", "AppendContext", "DropContext", "ListContexts")
_UNARY_METHODS = ("Attend", "ListModels", "GetModel", *_CONTEXT_METHODS)
_METADATA_KEY = re.compile(r"[0-9a-z_.-]+")
_PRINTABLE = re.compile(r"[\x20-\x7e]*")
_PORT = re.compile(r"[0-9]{1,5}")
# How the targets begin that gRPC resolves by a scheme; all others are HOST:PORT.
_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:", "xds:")
# The first that is set counts. Source: src/core/handshaker/http_connect/http_proxy_mapper.cc of gRPC.
_PROXY_VARIABLES, _USES_PROXY = ("grpc_proxy", "https_proxy", "http_proxy"), "grpc.enable_http_proxy"
_FAMILIES = ((socket.AF_INET, "ipv4:", "{}:{}"), (socket.AF_INET6, "ipv6:", "[{}]:{}"))
COMPRESSIONS = {
    None: grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}

Targets: TypeAlias = str | Sequence[str]
Compression: TypeAlias = Literal["gzip", "deflate"]
Metadata: TypeAlias = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]]
ChannelOptions: TypeAlias = Mapping[str, Any] | Iterable[tuple[str, Any]]


def one_of(field: str, value: Any, choices: Iterable[Any]) -> Any:
    """The value, if it is one of the choices: names or None.

    Raises:
        InvalidArgumentError: It is another.
    """
    allowed = tuple(choices)
    if not isinstance(value, str | None) or value not in allowed:
        raise invalid(field, f"one of {', '.join(map(repr, allowed))}", repr(value))
    return value


def seconds(timeout: float | None, *, default: float = DEFAULT_TIMEOUT, field: str = "timeout") -> float:
    """A call's timeout in seconds; None means the default, so that every call has a limit.

    Raises:
        InvalidArgumentError: The timeout is not a positive, finite number.
    """
    if timeout is None:
        return default
    if not isinstance(timeout, Real) or not 0 < timeout < math.inf:
        raise invalid(field, "a positive, finite number of seconds", repr(timeout))
    return float(timeout)


def read_options(
    targets: Sequence[str], max_message_bytes: int, service_config: str, overrides: ChannelOptions | None
) -> tuple[tuple[str, Any], ...]:
    """The options of gRPC's channel; those of the caller take precedence."""
    size = whole_number("max_message_bytes", max_message_bytes, 1, 2**31 - 1)
    options = {
        **_CHANNEL_OPTIONS,
        "grpc.max_send_message_length": size,
        "grpc.max_receive_message_length": size,
        # gRPC does not repeat a call whose messages exceed this; its own default is 256 KiB.
        "grpc.per_rpc_retry_buffer_size": size,
        "grpc.service_config": service_config,
    }
    if all(map(is_local, targets)):
        options[_USES_PROXY] = 0
    if len(targets) > 1:
        options["grpc.default_authority"] = targets[0]  # a list of addresses lacks a name
    return tuple((options | dict(_items("channel_options", overrides))).items())


def read_service_config(max_retries: int, attempt_timeout: float | None) -> str:
    """Load balancing, and retries; the time limit of an attempt is for unary calls.

    Source: grpc/service_config/service_config.proto of grpc/grpc-proto; `perAttemptRecvTimeout` is an
    addition of gRPC's core.
    """
    retries = whole_number("max_retries", max_retries, 0, MAX_RETRIES)
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    policy = _RETRY_POLICY | {"maxAttempts": retries + 1}
    if retries:
        config["methodConfig"] = [{"name": [{"service": _SERVICE}], "retryPolicy": policy}]
    if attempt_timeout is not None:
        limit = seconds(attempt_timeout, field="attempt_timeout")
        if not retries:
            raise invalid("attempt_timeout", "None if max_retries is 0", repr(attempt_timeout))
        names = [{"service": _SERVICE, "method": method} for method in _UNARY_METHODS]
        limited = policy | {"perAttemptRecvTimeout": f"{limit:.9f}s"}
        config["methodConfig"].append({"name": names, "retryPolicy": limited})
    return json.dumps(config)


def read_metadata(
    metadata: Metadata | None,
    token: str | None,
    targets: Sequence[str],
    credentials: grpc.ChannelCredentials | TlsFiles | None,
) -> tuple[tuple[str, str | bytes], ...]:
    """What is sent with every call."""
    pairs = []
    for key, value in _items("metadata", metadata):
        name = key.lower()
        if not _METADATA_KEY.fullmatch(name) or name.startswith("grpc-"):
            raise invalid(
                "metadata", "keys of letters, digits and _ . -, not beginning with grpc-", repr(key)
            )
        binary = name.endswith("-bin")
        valid = isinstance(value, bytes) if binary else isinstance(value, str) and _PRINTABLE.fullmatch(value)
        if not valid:
            raise invalid(f"metadata[{key!r}]", "bytes" if binary else "printable ASCII text", repr(value))
        pairs.append((name, value))
    if token is None:
        return tuple(pairs)
    if not isinstance(token, str) or not token or not _PRINTABLE.fullmatch(token):
        raise invalid("token", "printable ASCII text", type_name(token))  # never the token itself
    # An unencrypted connection carries the token on this machine only.
    if credentials is None and not all(is_local(target) for target in targets):
        expected = (
            "credentials as well, because the connection is not encrypted; in a network that encrypts by "
            'other means, pass metadata={"authorization": "Bearer TOKEN"}'
        )
        raise invalid("token", expected, f"credentials=None for {', '.join(targets)}")
    return (*pairs, ("authorization", f"Bearer {token}"))


def _items(field: str, value: Any) -> list[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, Mapping) else value or ()
    try:
        items = [(key, item) for key, item in pairs]
    except (TypeError, ValueError):
        raise invalid(field, "a mapping, or pairs of key and value", type_name(value)) from None
    if not all(isinstance(key, str) for key, _ in items):
        raise invalid(field, "keys of type str", [type_name(key) for key, _ in items])
    return items


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
    resolved = [addresses_of(target) for target in targets]
    for family, scheme, _ in _FAMILIES:
        lists = [addresses[family] for addresses in resolved]
        if all(lists):
            return scheme + ",".join(dict.fromkeys(chain(*lists)))
    raise invalid("target", "targets that all have IPv4 or all have IPv6 addresses", list(targets))


def is_local(target: str) -> bool:
    """Whether a connection to the target stays on this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = _host(target)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def proxy_variable(targets: Sequence[str], options: Sequence[tuple[str, Any]]) -> str:
    """The environment variable with the proxy through which gRPC connects; empty if it connects directly."""
    is_direct = not dict(options).get(_USES_PROXY, 1) or all(map(proxy_bypass, map(_host, targets)))
    return "" if is_direct else next(filter(os.environ.get, _PROXY_VARIABLES), "")


def _host(target: str) -> str:
    address = re.sub(r"^(ipv4|ipv6|dns):(.*/)?", "", target)
    return address.rpartition(":")[0].strip("[]")


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
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"{target}: {error}", field="target") from None
    return {
        family: [form.format(*address[:2]) for kind, *_, address in entries if kind is family]
        for family, _, form in _FAMILIES
    }
