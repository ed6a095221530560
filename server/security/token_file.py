"""The tokens file: identities with their proofs and rights, as JSON or TOML.

{"identities": [{"name": "reports", "sha256": "…", "expires": "2027-01-31T00:00:00Z", "rights": ["infer:*"]}]}

The file holds no secret: a token cannot be found by its hash. Who may write to it decides who may do what.
"""

import hashlib
import json
import logging
import math
import os
import stat
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self

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

from attention_serving.server.errors import IdentityError
from attention_serving.server.security.rights import Identity, Rights, Source

log = logging.getLogger(__name__)
TOML = ".toml"
MAX_FILE_BYTES = 16 << 20
# Problems that one message lists.
MAX_PROBLEMS = 5
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
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
    def identity(self) -> Identity:
        """The identity that the entry describes."""
        return Identity(
            source=Source.TOKEN if self.certificate is None else Source.CERTIFICATE,
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
        for field in ("name", "sha256", "certificate"):
            values = Counter(getattr(entry, field) for entry in self.identities)
            values.pop(None, None)
            twice = [value for value, count in values.items() if count > 1]
            if twice:
                # A hash is not shown: its entry is found by its name.
                shown = repr(twice[0]) if field != "sha256" else "a token"
                raise ValueError(f"{shown} is the {field} of more than one identity")
        return self


class TokenTable:
    """The identities of a file, by what proves them."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        """Indexes the entries of a checked file."""
        self._by_digest = {bytes.fromhex(entry.sha256): entry.identity for entry in entries if entry.sha256}
        self._by_certificate = {entry.certificate: entry.identity for entry in entries if entry.certificate}

    def of_token(self, digest: bytes) -> Identity | None:
        """The identity of a presented token, given its SHA-256; None if there is none.

        How long it takes depends on the hash only. Who measures how far a comparison went learns how a hash
        begins, and would have to invert SHA-256 to present a token with such a hash.
        """
        return self._by_digest.get(digest)

    def of_certificate(self, names: Iterable[str]) -> Identity | None:
        """The identity of a verified client certificate that has these names; None if there is none."""
        found = (self._by_certificate.get(name) for name in names)
        return next((identity for identity in found if identity is not None), None)


def read_bytes(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """The content of a file of tokens or keys.

    Raises:
        IdentityError: It cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise IdentityError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise IdentityError(f"{path}: is larger than {most} bytes")
    return content


def warn_if_others_may_write(path: Path) -> None:
    """Logs a warning if other users may change a file that decides who may do what."""
    with suppress(OSError):  # it was removed at this moment
        if path.stat().st_mode & WRITABLE_BY_OTHERS:
            log.warning("other users may change the file", extra={"file": path})


def parse_table(path: Path, content: bytes) -> TokenTable:
    """The table of the tokens file, for those who follow it.

    Raises:
        IdentityError: An entry is wrong.
    """
    table = TokenTable(parse_file(path, content).identities)
    warn_if_others_may_write(path)
    return table


def read_file(path: Path) -> TokenFile:
    """Reads and checks a file.

    Raises:
        IdentityError: The file cannot be read, or an entry is wrong.
    """
    return parse_file(path, read_bytes(path))


def parse_file(path: Path, content: bytes) -> TokenFile:
    """Checks the content of a file; JSON, or TOML if its name ends with .toml.

    Raises:
        IdentityError: An entry is wrong.
    """
    kind = "TOML" if path.suffix == TOML else "JSON"
    try:
        text = content.decode()
        found: Any = tomllib.loads(text) if kind == "TOML" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IdentityError(f"{path}: is not {kind}: {error}") from None
    try:
        return TokenFile.model_validate(found)
    except ValidationError as error:
        raise IdentityError(f"{path}: {problems(error)}") from None


def write_file(path: Path, content: TokenFile) -> None:
    """Replaces a file in one step. Only its owner may read and write the new one.

    Raises:
        IdentityError: The file cannot be written, or is TOML.
    """
    if path.suffix == TOML:
        raise IdentityError(f"{path}: TOML files are changed by hand; this command writes JSON")
    data = content.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps({"identities": data.get("identities", [])}, indent=2) + "\n"
    temporary = ""
    try:
        # Made with mode 0600, in the same folder: the rename then is atomic.
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            with suppress(OSError):
                Path(temporary).unlink()
        raise IdentityError(f"{path}: cannot be written: {error.strerror}") from error


def problems(error: ValidationError) -> str:
    """Where and what. Not the given values: a token may stand in the place of its hash."""
    found = []
    for details in error.errors(include_input=False, include_url=False)[:MAX_PROBLEMS]:
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
        found.append(f"{where.removeprefix('.') or 'file'}: {details['msg'].removeprefix('Value error, ')}")
    return "; ".join(found)


def digest_of(token: str) -> bytes:
    """The SHA-256 of a token, 32 bytes."""
    return hashlib.sha256(token.encode()).digest()
