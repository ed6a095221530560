"""Options of identity and rights: who may do what, and how much of the server one identity may hold."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ByteSize, Field, ValidationInfo, field_validator


class IdentityAndRights(BaseModel):
    """Who may do what. With neither tokens nor jwt_jwks, everyone may do everything."""

    tokens: Path | None = Field(
        None,
        description="File of tokens and client certificates and their rights: JSON, or TOML if it ends with"
        " .toml. It is read again when it changes. python -m server.tokens makes it.",
    )
    jwt_issuer: str = Field("", description="Issuer of JSON Web Tokens: what the claim iss must be.")
    jwt_audience: str = Field(
        "", description="Audience of JSON Web Tokens: what the claim aud must be or contain."
    )
    jwt_jwks: str | None = Field(
        None,
        description="Public keys that verify JSON Web Tokens, as a JWK set: a file, or a URL that begins with"
        " https. Needs jwt_issuer and jwt_audience.",
    )
    jwt_rights_claim: str = Field(
        "scope",
        min_length=1,
        description="Claim of JSON Web Tokens with the rights: a text with spaces between them, or an array.",
    )
    jwt_refresh_seconds: float = Field(
        3600.0,
        ge=1,
        le=1_000_000,
        allow_inf_nan=False,
        description="How often the keys of a URL are fetched, in seconds, 1 to 1000000. A token of an unknown"
        " key has them fetched at once, but not within 10 seconds of the last time.",
    )
    open_reflection: bool = Field(
        default=False, description="Let everyone use server reflection; otherwise it needs the right read."
    )
    protect_metrics: bool = Field(
        default=False,
        description="Require a token with the right read for metrics; otherwise everyone may read them.",
    )
    identity_max_calls: int = Field(
        0,
        ge=0,
        description="Maximum number of inference calls of one identity in progress, at least 0. Its entry in"
        " the file may state another. 0 sets no limit beside identity_share.",
    )
    identity_max_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(0),
        description="Maximum memory that requests of one identity occupy, at least 0. Its entry in the file"
        " may state another. 0 sets no limit beside identity_share.",
    )
    identity_share: float = Field(
        0.8,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Part of the calls, streams and memory that one identity may hold while nobody else holds"
        " any, above 0, at most 1. What several hold together leaves room for others. 1 sets no limit.",
    )

    @property
    def has_identities(self) -> bool:
        """Whether callers have to say who they are."""
        return self.tokens is not None or bool(self.jwt_jwks)

    @field_validator("jwt_jwks")
    @classmethod
    def _has_issuer_and_audience(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value and not (info.data.get("jwt_issuer") and info.data.get("jwt_audience")):
            raise ValueError("needs jwt_issuer and jwt_audience")
        return value
