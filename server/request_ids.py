"""Identifiers of requests: as callers send them in `x-request-id`, or made here."""

import random
import re
from collections.abc import Iterable

# The key of gRPC's metadata, and the header of HTTP.
KEY = "x-request-id"
# Visible ASCII, and short enough for a line of the log.
_SANE = re.compile(r"[!-~]{1,128}")


def new() -> str:
    """A new identifier: 128 random bits in hexadecimal. It names a request and protects nothing."""
    return f"{random.getrandbits(128):032x}"


def sane(value: str | bytes | None) -> str:
    """The identifier if it is 1 to 128 visible ASCII characters; otherwise empty."""
    return value if isinstance(value, str) and _SANE.fullmatch(value) else ""


def sent(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The identifier in a call's metadata; empty if there is none that can be taken."""
    for key, value in metadata:
        if key == KEY:
            return sane(value)
    return ""
