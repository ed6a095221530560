"""Who calls, and what they may do: identities, their rights, and the errors of calls that are not permitted.

infer:PATTERN   compute with the models whose names match the pattern
read:PATTERN    see these models: their metadata, configuration, statistics and state; `read` alone is read:*
admin           load and unload models, register shared memory, read the settings of logs and traces

A pattern is that of a shell: * for any text, ? for one character, [ab] for one of several. Rights are
independent: admin does not imply infer or read.

EngineError
├── CredentialsError         UNAUTHENTICATED: it is not known who calls
│   ├── MissingCredentialsError     the call has none
│   ├── InvalidTokenError           the token is not one of this server's, or was revoked
│   └── ExpiredTokenError           the token was valid once
├── PermissionDeniedError    PERMISSION_DENIED: the identity lacks a right
└── KeysUnavailableError     UNAVAILABLE: the keys that verify tokens have not been fetched yet

No message contains a token.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Literal, Self

from attention_serving.server.engine.budget import Caller
from attention_serving.server.engine.errors import Code, EngineError, quoted

RIGHT = re.compile(r"(infer|read):([\w.*?\[\]!-]{1,200})|(read|admin)", re.ASCII)
EVERY_MODEL = "*"
MAX_RIGHTS = 256


class CredentialsError(EngineError, code=Code.UNAUTHENTICATED, reason="CREDENTIALS_INVALID"):
    """It is not known who calls."""


class MissingCredentialsError(CredentialsError, reason="CREDENTIALS_MISSING"):
    """The call has neither a token nor a certificate that this server knows."""


class InvalidTokenError(CredentialsError, reason="TOKEN_INVALID"):
    """The token is not one of this server's: it is wrong, or was revoked."""


class ExpiredTokenError(CredentialsError, reason="TOKEN_EXPIRED"):
    """The token was valid once."""


class PermissionDeniedError(EngineError, code=Code.PERMISSION_DENIED, reason="RIGHT_MISSING"):
    """The caller is known, and lacks a right, which the message names."""


class KeysUnavailableError(EngineError, code=Code.UNAVAILABLE, reason="KEYS_UNAVAILABLE"):
    """The keys that verify tokens have not been fetched yet."""


class Right(StrEnum):
    """The kinds of rights. A method needs one of them, or none."""

    INFER = "infer"
    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Rights:
    """What an identity may do.

    Attributes:
        patterns: For each right, patterns of the models that it holds for; for admin all models, or none.
    """

    patterns: Mapping[Right, list[str]]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Reads rights.

        Raises:
            ValueError: A text is not a right, or there are too many.
        """
        patterns: dict[Right, list[str]] = {right: [] for right in Right}
        for text in texts:
            if (match := RIGHT.fullmatch(text)) is None:
                must = "must be infer:PATTERN, read, read:PATTERN or admin"
                raise ValueError(f"{text[:100]!r} is not a right; {must}")
            right, pattern, for_all = match.groups()
            patterns[Right(right or for_all)].append(pattern or EVERY_MODEL)
        if sum(map(len, patterns.values())) > MAX_RIGHTS:
            raise ValueError(f"there are more than {MAX_RIGHTS} rights")
        return cls(patterns)

    @classmethod
    def parse_known(cls, texts: Iterable[str]) -> Self:
        """The rights among texts that may mean something else to others, such as the scopes of a token."""
        return cls.parse([text for text in texts if RIGHT.fullmatch(text)][:MAX_RIGHTS])

    def covers(self, right: Right, model: str) -> bool:
        """Whether the identity has a right for a model."""
        return any(fnmatchcase(model, pattern) for pattern in self.patterns[right])

    @property
    def reads_every_model(self) -> bool:
        """Whether no model is hidden from the identity."""
        return EVERY_MODEL in self.patterns[Right.READ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who calls.

    Attributes:
        source: What the identity was proven by. Equal names from two sources are two identities.
        name: Its name within the source.
        rights: What it may do.
        expires: When it ends, in seconds since 1970.
        max_calls: Its inference calls in progress at most, streams included; 0 sets no limit of its own.
        max_bytes: Memory of its requests in progress at most, in bytes; 0 sets no limit of its own.
        queue_weight: Its share of the runs in relation to other identities that have requests in the queue.
        caller: The same identity as the engine knows it.
    """

    source: Literal["token", "certificate", "jwt"]
    name: str
    rights: Rights
    expires: float = math.inf
    max_calls: int = 0
    max_bytes: int = 0
    queue_weight: float = 1.0
    caller: Caller = field(init=False)

    def __post_init__(self) -> None:
        name = f"{self.source}:{self.name}"
        object.__setattr__(self, "caller", Caller(name, self.queue_weight))

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
        if not self.rights.patterns[right]:
            raise PermissionDeniedError(f"the identity {self.name!r} does not have the right {right}")

    def require_model(self, right: Right, model: str, sent_name: str) -> None:
        """Checks a right for a model, which need not exist. Errors show the name that was sent.

        Raises:
            PermissionDeniedError: The identity does not have it.
        """
        if not self.rights.covers(right, model):
            message = (
                f"the identity {self.name!r} does not have the right {right} for model {quoted(sent_name)}"
            )
            raise PermissionDeniedError(message, field="model_name")
