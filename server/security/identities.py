"""Who calls: an identity has a name, rights, limits and an end."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from attention_serving.server.engine.errors import quoted
from attention_serving.server.engine.schedule.fair_shares import Caller
from attention_serving.server.security.errors import ExpiredTokenError, PermissionDeniedError
from attention_serving.server.security.rights import Right, Rights


class Source(StrEnum):
    """What an identity was proven by. Equal names from two sources are two identities."""

    TOKEN = "token"  # noqa: S105 - the name of a kind
    CERTIFICATE = "certificate"
    WEB_TOKEN = "jwt"  # noqa: S105 - the name of a kind


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityLimits:
    """What one identity may hold. 0 sets no limit of its own.

    Attributes:
        max_calls: Inference calls in progress, streams included.
        max_bytes: Memory of its requests in progress, in bytes.
        queue_weight: Its share of the runs in relation to other identities that have requests in the queue.
    """

    max_calls: int = 0
    max_bytes: int = 0
    queue_weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who calls.

    Attributes:
        source: What the identity was proven by.
        name: Its name within the source.
        rights: What it may do.
        expires: When it ends, in seconds since 1970.
        limits: What it may hold.
        caller: The same identity as the engine knows it.
    """

    source: Source
    name: str
    rights: Rights
    expires: float = math.inf
    limits: IdentityLimits = IdentityLimits()
    caller: Caller = field(init=False)

    def __post_init__(self) -> None:
        name = f"{self.source}:{self.name}"
        object.__setattr__(self, "caller", Caller(name, self.limits.queue_weight))

    def check_expiry(self, now: float) -> None:
        """Checks that the identity has not ended.

        Raises:
            ExpiredTokenError: It has.
        """
        if now >= self.expires:
            raise ExpiredTokenError("the token, or the entry of the certificate, has expired; get a new one")

    def require(self, right: Right) -> None:
        """Checks a right, for some model at least.

        Raises:
            PermissionDeniedError: The identity does not have it.
        """
        if not self.rights.has(right):
            raise PermissionDeniedError(f"the identity {self.name!r} does not have the right {right}")

    def require_model(self, right: Right, model: str) -> None:
        """Checks a right for a model, which need not exist.

        Raises:
            PermissionDeniedError: The identity does not have it.
        """
        if not self.rights.covers(right, model):
            raise PermissionDeniedError(
                f"the identity {self.name!r} does not have the right {right} for model {quoted(model)}",
                field="model_name",
            )
