"""The tokens file: identities with their proofs and rights, as JSON or TOML.

{"identities": [{"name": "reports", "sha256": "…", "expires": "2027-01-31T00:00:00Z", "rights": ["infer:*"]}]}

The file holds no secret: nobody finds a token by its hash. Who may write to it decides who may do what.
"""

import hmac
import json
import os
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from attention_serving.server.security.entries import Entry
from attention_serving.server.security.errors import SecurityFileError
from attention_serving.server.security.identities import Identity, IdentityLimits

TOML = ".toml"
MAX_FILE_BYTES = 16 << 20
# Problems that one message lists.
MAX_PROBLEMS = 5
OWNER_ONLY = 0o600


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


class _Known(NamedTuple):
    digest: bytes
    identity: Identity | None


NOBODY = _Known(bytes(32), None)


class TokenTable:
    """The identities of a file, by what proves them."""

    def __init__(self, entries: Iterable[Entry], defaults: IdentityLimits) -> None:
        """Indexes the entries.

        Args:
            entries: Those of a checked file.
            defaults: Limits of entries that do not state their own.
        """
        self._by_digest: dict[bytes, _Known] = {}
        self._by_certificate: dict[str, Identity] = {}
        for entry in entries:
            identity = entry.identity(defaults)
            if entry.sha256 is not None:
                digest = bytes.fromhex(entry.sha256)
                self._by_digest[digest] = _Known(digest, identity)
            if entry.certificate is not None:
                self._by_certificate[entry.certificate] = identity

    def of_token(self, digest: bytes) -> Identity | None:
        """The identity of a presented token, given its SHA-256; None if there is none.

        The time depends on the hash of what was presented only. The table is searched by that hash: whoever
        measures how far a comparison went learns about a hash that begins as that of another token does, and
        to present such a token he would have to invert SHA-256. What was found is compared in constant time
        all the same, and if nothing was found, something is.
        """
        known = self._by_digest.get(digest, NOBODY)
        return known.identity if hmac.compare_digest(known.digest, digest) else None

    def of_certificate(self, names: Iterable[str]) -> Identity | None:
        """The identity of a verified client certificate that has these names; None if there is none."""
        found = (self._by_certificate.get(name) for name in names)
        return next((identity for identity in found if identity is not None), None)


def read_table(path: Path, defaults: IdentityLimits) -> TokenTable:
    """The table of a file.

    Raises:
        SecurityFileError: The file cannot be read, or an entry is wrong.
    """
    return TokenTable(read_file(path).identities, defaults)


def read_file(path: Path) -> TokenFile:
    """Reads and checks a file; JSON, or TOML if its name ends with .toml.

    Raises:
        SecurityFileError: The file cannot be read, or an entry is wrong.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SecurityFileError(f"{path}: is larger than {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        content: Any = tomllib.loads(text) if path.suffix == TOML else json.loads(text)
    except OSError as error:
        raise SecurityFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == TOML else "JSON"
        raise SecurityFileError(f"{path}: is not {kind}: {error}") from None
    try:
        return TokenFile.model_validate(content)
    except ValidationError as error:
        raise SecurityFileError(f"{path}: {_problems(error)}") from None


def write_file(path: Path, content: TokenFile) -> None:
    """Replaces a file in one step. Only its owner may read and write the new one.

    Raises:
        SecurityFileError: The file cannot be written, or is TOML.
    """
    if path.suffix == TOML:
        raise SecurityFileError(f"{path}: TOML files are changed by hand; this command writes JSON")
    data = content.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps({"identities": data.get("identities", [])}, indent=2) + "\n"
    temporary = ""
    try:
        # Made with mode 0600, in the same folder: the rename then is atomic.
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), OWNER_ONLY)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            with suppress(OSError):
                Path(temporary).unlink()
        raise SecurityFileError(f"{path}: cannot be written: {error.strerror}") from error


def _problems(error: ValidationError) -> str:
    """Where and what. Not the given values: somebody may have put a token in the place of its hash."""
    found = []
    for details in error.errors(include_input=False, include_url=False)[:MAX_PROBLEMS]:
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
        found.append(f"{where.removeprefix('.') or 'file'}: {details['msg'].removeprefix('Value error, ')}")
    return "; ".join(found)
