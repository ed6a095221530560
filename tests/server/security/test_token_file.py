"""The tokens file: what is accepted, what is refused without showing a secret, and how it is written."""

import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from attention_serving.server.errors import ServerError
from attention_serving.server.security.rights import Right
from attention_serving.server.security.token_file import Entry, TokenFile, digest_of, read_file, write_file
from tests.server.security.samples import entry, table_in, write_tokens

HASH = digest_of("secret").hex()


def test_tokens_and_certificates_find_their_identities(tmp_path: Path) -> None:
    path = write_tokens(
        tmp_path / "tokens.json",
        entry("one", "first", "infer:a", "admin", max_calls=7, queue_weight=0.5),
        entry("jobs", None, "read", certificate="spiffe://a/jobs"),
    )
    table = table_in(path)
    found = table[digest_of("first")]
    assert (found.name, found.source, found.rights.covers(Right.ADMIN, "any")) == ("one", "token", True)
    assert (found.max_calls, found.max_bytes, found.caller.weight) == (7, 0, 0.5)
    assert found.caller.name == "token:one"
    found = table["spiffe://a/jobs"]
    assert (found.name, found.source) == ("jobs", "certificate")
    assert len(table) == 2


def test_toml_and_json_are_read_alike(tmp_path: Path) -> None:
    toml = tmp_path / "tokens.toml"
    toml.write_text(
        f'[[identities]]\nname = "one"\nsha256 = "{HASH}"\nexpires = 2027-01-31T00:00:00Z\n'
        'rights = ["infer:*"]\nmax_bytes = "1MiB"\n'
    )
    expires = datetime(2027, 1, 31, tzinfo=UTC)
    same = entry("one", "secret", "infer:*", expires=expires.isoformat(), max_bytes=1 << 20)
    assert read_file(toml) == read_file(write_tokens(tmp_path / "tokens.json", same))
    identity = table_in(toml)[digest_of("secret")]
    assert (identity.expires, identity.max_bytes) == (expires.timestamp(), 1 << 20)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "file: Input should be"),
        ([entry("a b", "t", "read")], "identities[0].name: String should match"),
        ([entry("a", "t", "write")], "identities[0].rights: 'write' is not a right"),
        ([entry("a", None, "read")], "must have either sha256 or certificate"),
        ([entry("a", "t", "read", certificate="c")], "must have either sha256 or certificate"),
        ([entry("a", None, "read", sha256="t0p-s3cret")], "identities[0].sha256: String should"),
        ([entry("a", None, "read", key="t0p-s3cret")], "identities[0].key: Extra"),
        ([entry("a", "t", "read", expires="2027-01-31T00:00:00")], "identities[0].expires: "),
        ([entry("a", "t", "read", queue_weight=0)], "identities[0].queue_weight: "),
        ([entry("a", "t", "read"), entry("a", "u", "read")], "two identities have the name 'a'"),
        ([entry("a", "t", "read"), entry("b", "t", "read")], "two identities have the same token"),
    ],
    ids=range(13),
)
def test_a_wrong_file_is_refused_without_secrets(content: Any, error: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(content if isinstance(content, str) else json.dumps({"identities": content}))
    with pytest.raises(ServerError) as raised:
        read_file(path)
    assert error in str(raised.value)
    assert str(path) in str(raised.value)
    assert "t0p-s3cret" not in str(raised.value)


def test_a_file_is_replaced_whole_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tokens(tmp_path / "tokens.json", entry("old", "t", "read"))
    path.chmod(0o644)
    content = TokenFile(identities=(Entry(name="new", sha256=HASH, rights=("infer:a", "read")),))
    write_file(path, content)
    assert read_file(path) == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ServerError, match="cannot be written: No space"):
        write_file(path, TokenFile(identities=()))
    assert read_file(path) == content
    assert [file.name for file in tmp_path.iterdir()] == ["tokens.json"]
    with pytest.raises(ServerError, match="TOML files are changed by hand"):
        write_file(tmp_path / "tokens.toml", content)
