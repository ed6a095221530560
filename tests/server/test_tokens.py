"""The command `python -m server.tokens`."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from attention_serving.server.security.token_file import digest_of, read_file
from attention_serving.server.tokens import application
from tests.server.security.samples import table_in
from tests.support.artifacts import edit_json


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
        (
            ["create", "one", "--right", "read"],
            "two identities have the name 'one'; choose another, or revoke",
        ),
        (
            ["create", "two", "--right", "read", "--certificate", "a.example"],
            "two identities have the certificate 'a.example'",
        ),
        (["create", "two", "--right", "write"], "rights: 'write' is not a right; must be infer:PATTERN"),
        (["create", "a b", "--right", "read"], "name: String should match pattern"),
        (["create", "two", "--right", "read", "--max-bytes", "many"], "max_bytes: "),
        (["revoke", "three"], "three does not exist; there are: one"),
    ],
)
def test_errors_leave_the_file_as_it_was(file: Path, arguments: list[str], error: str) -> None:
    create("one", "--certificate", "a.example")
    before = file.read_bytes()
    done = run(*arguments)
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
