"""One identity of the tokens file."""

import hashlib
import math
import secrets
from typing import Annotated, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from attention_serving.server.security.identities import Identity, IdentityLimits, Source
from attention_serving.server.security.rights import Rights

# 256 bits of the operating system's random numbers.
TOKEN_BYTES = 32
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}$"
SHA256 = r"^[0-9a-f]{64}$"


class Entry(BaseModel):
    """An identity, and what proves it: a bearer token, or the name in a verified client certificate.

    Attributes:
        name: Name of the identity.
        sha256: SHA-256 of its token, in hexadecimal. A fast hash is right here, as it would be wrong for
            passwords: a slow one makes it expensive to try likely passwords, and of 2**256 equally likely
            tokens none can be found by trying. It is computed for every call.
        certificate: A name in its certificate, as `peer_identities` of the transport returns it.
        expires: When it ends; None for never.
        rights: What it may do; see `server.security.rights`.
        max_calls: Its inference calls in progress at most; None takes the setting, 0 sets no limit.
        max_bytes: Memory of its requests in progress at most; None takes the setting, 0 sets no limit.
        queue_weight: Its share of the runs in relation to others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=NAME)
    sha256: str | None = Field(default=None, pattern=SHA256)
    certificate: str | None = Field(default=None, min_length=1, max_length=1000)
    expires: AwareDatetime | None = None
    rights: tuple[str, ...]
    max_calls: int | None = Field(default=None, ge=0)
    max_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    queue_weight: float = Field(default=1.0, ge=0.001, le=1000, allow_inf_nan=False)

    @field_validator("rights")
    @classmethod
    def _are_rights(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        Rights.parse(value)
        return value

    @model_validator(mode="after")
    def _has_one_proof(self) -> Self:
        if (self.sha256 is None) == (self.certificate is None):
            raise ValueError("must have either sha256 or certificate")
        return self

    def identity(self, defaults: IdentityLimits) -> Identity:
        """The identity.

        Args:
            defaults: Limits of entries that do not state their own.
        """
        return Identity(
            source=Source.TOKEN if self.certificate is None else Source.CERTIFICATE,
            name=self.name,
            rights=Rights.parse(self.rights),
            expires=math.inf if self.expires is None else self.expires.timestamp(),
            limits=IdentityLimits(
                max_calls=defaults.max_calls if self.max_calls is None else self.max_calls,
                max_bytes=defaults.max_bytes if self.max_bytes is None else self.max_bytes,
                queue_weight=self.queue_weight,
            ),
        )


def digest_of(token: str) -> bytes:
    """The SHA-256 of a token, 32 bytes."""
    return hashlib.sha256(token.encode()).digest()


def new_token() -> str:
    """A random token of 43 characters."""
    return secrets.token_urlsafe(TOKEN_BYTES)
