"""The tokens file: identities with their proofs and rights, as JSON or TOML.

{"identities": [{"name": "reports", "sha256": "…", "expires": "2027-01-31T00:00:00Z", "rights": ["infer:*"]}]}

The file holds no secret: a token cannot be found by its hash. Who may write to it decides who may do what.
"""

import hashlib
import json
import math
import os
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from pydantic import (
    AwareDatetime,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from attention_serving.server.errors import ServerError
from attention_serving.server.security.rights import Identity, Rights
from attention_serving.server.threads import read_bytes

TOML = ".toml"
# Problems that one message lists.
MAX_PROBLEMS = 5
# The identities of a file, by the SHA-256 of a token or the name in a certificate. How long a look-up takes
# depends on the hash only. Who measures how far a comparison went learns how a hash begins, and would have to
# invert SHA-256 to present a token with such a hash.
TokenTable: TypeAlias = Mapping[bytes | str, Identity]
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}$"
SHA256 = r"^[0-9a-f]{64}$"


class Entry(BaseModel):
    """An identity, and what proves it: a bearer token, or the name in a verified client certificate.

    Attributes:
        name: Name of the identity.
        sha256: SHA-256 of its token, in hexadecimal. A fast hash is right here, as it would be wrong for
            passwords: a slow one makes it expensive to try likely passwords, and of 2**256 equally likely
            tokens none can be found by trying. It is computed for every call.
        certificate: A name in its certificate, as `server.security.peers.names_in` returns it.
        expires: When it ends; None for never.
        rights: What it may do; see `server.security.rights`.
        max_calls: See `Identity`, as for `max_bytes` and `queue_weight`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=NAME)
    sha256: str | None = Field(default=None, pattern=SHA256)
    certificate: str | None = Field(default=None, min_length=1, max_length=1000)
    expires: AwareDatetime | None = None
    rights: tuple[str, ...]
    max_calls: int = Field(default=0, ge=0)
    max_bytes: Annotated[ByteSize, Field(ge=0)] = ByteSize(0)
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

    @property
    def proof(self) -> bytes | str:
        """What proves the identity: the SHA-256 of its token, or the name in its certificate."""
        return bytes.fromhex(self.sha256) if self.sha256 else str(self.certificate)

    @property
    def identity(self) -> Identity:
        """The identity that the entry describes."""
        return Identity(
            source="token" if self.certificate is None else "certificate",
            name=self.name,
            rights=Rights.parse(self.rights),
            expires=math.inf if self.expires is None else self.expires.timestamp(),
            max_calls=self.max_calls,
            max_bytes=self.max_bytes,
            queue_weight=self.queue_weight,
        )


class TokenFile(BaseModel):
    """The content of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    identities: tuple[Entry, ...]

    @model_validator(mode="after")
    def _are_distinct(self) -> Self:
        for field, noun in (("name", "name"), ("proof", "certificate")):
            values = Counter(getattr(entry, field) for entry in self.identities)
            twice = [value for value, count in values.items() if count > 1]
            if twice:
                # A hash is not shown: its entry is found by its name.
                value = f"the {noun} {twice[0]!r}" if isinstance(twice[0], str) else "the same token"
                raise ValueError(
                    f"two identities have {value}; choose another, revoke one of them first, or create "
                    "with --replace"
                )
        return self


def parse_table(path: Path, content: bytes) -> TokenTable:
    """The identities of the tokens file by what proves them, for those who follow it.

    Raises:
        ServerError: An entry is wrong.
    """
    return {entry.proof: entry.identity for entry in parse_file(path, content).identities}


def read_file(path: Path) -> TokenFile:
    """Reads and checks a file.

    Raises:
        ServerError: The file cannot be read, or an entry is wrong.
    """
    return parse_file(path, read_bytes(path))


def parse_file(path: Path, content: bytes) -> TokenFile:
    """Checks the content of a tokens file.

    Raises:
        ServerError: An entry is wrong.
    """
    try:
        return TokenFile.model_validate(parse_text(path, content))
    except ValidationError as error:
        raise ServerError(f"{path}: {problems(error)}") from None


def parse_text(path: Path, content: bytes) -> Any:
    """What the text of a file says; JSON, or TOML if its name ends with .toml.

    Raises:
        ServerError: It is something else.
    """
    is_toml = path.suffix == TOML
    try:
        text = content.decode()
        return tomllib.loads(text) if is_toml else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"{path}: is not {'TOML' if is_toml else 'JSON'}: {error}") from None


def write_file(path: Path, content: TokenFile) -> None:
    """Replaces a file in one step. Only its owner may read and write the new one.

    Raises:
        ServerError: The file cannot be written, or is TOML.
    """
    if path.suffix == TOML:
        raise ServerError(f"{path}: TOML files are changed by hand; this command writes JSON")
    data = content.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps({"identities": data.get("identities", [])}, indent=2) + "\n"
    try:
        # Made for its owner only, in the same folder: the rename then is atomic.
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            new = Path(folder, path.name)
            new.touch(0o600)
            with new.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
    except OSError as error:
        raise ServerError(f"{path}: cannot be written: {error.strerror}") from error


def problems(error: ValidationError) -> str:
    """Where and what. Not the given values: a token may stand in the place of its hash."""
    lines = []
    for details in error.errors(include_input=False, include_url=False)[:MAX_PROBLEMS]:
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
        lines.append(f"{where.removeprefix('.') or 'file'}: {details['msg'].removeprefix('Value error, ')}")
    return "; ".join(lines)


def digest_of(token: str) -> bytes:
    """The SHA-256 of a token, 32 bytes."""
    return hashlib.sha256(token.encode()).digest()
