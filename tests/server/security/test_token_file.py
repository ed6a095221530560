"""The tokens file and its command: what is accepted, refused without showing a secret, and written."""

import json
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from attention_serving.server.errors import ServerError
from attention_serving.server.security.rights import Right
from attention_serving.server.security.token_file import Entry, TokenFile, digest_of, read_file, write_file
from attention_serving.server.tokens import application
from tests.server.security.samples import entry, table_in, write_tokens
from tests.support.artifacts import edit_json

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


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the server's variable names."""
    monkeypatch.setenv("ATTENTION_TOKENS", str(tmp_path / "tokens.json"))
    return tmp_path / "tokens.json"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application, list(map(str, arguments)))


def create(name: str, *options: str | Path) -> Result:
    return run("create", name, "--right", "infer:*", *options)


def test_a_token_is_printed_once_known_to_the_file_and_revoked(file: Path) -> None:
    done = create("one", "--right", "read", "--max-calls", "3", "--max-bytes", "1MiB")
    assert done.exit_code == 0, done.stderr
    token = done.stdout.strip()
    identity = table_in(file).get(digest_of(token))
    assert identity is not None
    assert (identity.name, identity.max_calls, identity.max_bytes) == ("one", 3, 1 << 20)
    in_90_days = (datetime.now(UTC) + timedelta(days=90)).timestamp()
    assert identity.expires == pytest.approx(in_90_days, abs=60)
    assert token not in file.read_text() + done.stderr
    other = create("one", "--replace").stdout.strip()
    assert [table_in(file).get(digest_of(each)) is None for each in (token, other)] == [True, False]
    create("two")
    assert run("revoke", "one").exit_code == 0
    assert [entry.name for entry in read_file(file).identities] == ["two"]


def test_list_shows_name_rights_and_end_and_no_hash(file: Path) -> None:
    create("one", "--days", "0")
    assert create("old", "--certificate", "old.example").stdout == ""
    edit_json(file, lambda content: content["identities"][1].update(expires="2020-01-01T00:00:00Z"))
    table = run("list").stdout
    assert [line.split() for line in table.splitlines()] == [
        ["NAME", "BY", "EXPIRES", "RIGHTS"],
        ["one", "token", "never", "infer:*"],
        ["old", "certificate", "old.example", "2020-01-01T00:00:00+00:00", "(expired)", "infer:*"],
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("create one --right read", "two identities have the name 'one'; choose another, revoke one"),
        ("create two --right read --certificate a.example", "have the certificate 'a.example'"),
        ("create two --right write", "rights: 'write' is not a right; must be infer:PATTERN"),
        ("create two --right read --max-bytes many", "max_bytes: "),
        ("revoke three", "three does not exist; there are: one"),
    ],
)
def test_errors_leave_the_file_as_it_was(file: Path, arguments: str, error: str) -> None:
    create("one", "--certificate", "a.example")
    before = file.read_bytes()
    done = run(*arguments.split())
    assert (done.exit_code, done.stdout) == (1, "")
    assert error in done.stderr
    assert file.read_bytes() == before


def test_a_file_or_folder_that_does_not_exist_is_named(file: Path) -> None:
    done = run("list")
    assert done.exit_code == 1
    assert f"{file}: cannot be read: No such file" in done.stderr
    done = create("one", "--file", file.parent / "absent/tokens.json")
    assert done.exit_code == 1
    assert "cannot be opened: No such file" in done.stderr
