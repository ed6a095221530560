"""The command `python -m server.tokens`, as a process and in this one."""

import json
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from attention_serving.server.security.token_file import digest_of, read_file
from attention_serving.server.tokens import application
from tests.server.samples import ROOT
from tests.server.security.samples import table_in


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application, list(map(str, arguments)))


def create(file: Path, name: str, *options: str) -> Result:
    return run("create", name, "--file", file, "--right", "infer:*", *options)


def test_create_prints_a_token_once_that_the_file_knows(file: Path) -> None:
    done = create(file, "one", "--right", "read", "--max-calls", "3", "--max-bytes", "1MiB")
    assert done.exit_code == 0, done.stderr
    token = done.stdout.strip()
    identity = table_in(file).of_token(digest_of(token))
    assert identity is not None
    assert identity.name == "one"
    assert (identity.limits.max_calls, identity.limits.max_bytes) == (3, 1 << 20)
    in_90_days = (datetime.now(UTC) + timedelta(days=90)).timestamp()
    assert identity.expires == pytest.approx(in_90_days, abs=60)
    assert token not in file.read_text()
    assert token not in done.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_token_without_end(file: Path) -> None:
    create(file, "one", "--days", "0")
    assert read_file(file).identities[0].expires is None


def test_a_certificate_has_no_token(file: Path) -> None:
    done = create(file, "jobs", "--certificate", "jobs.example")
    assert done.exit_code == 0
    assert done.stdout == ""
    assert read_file(file).identities[0].certificate == "jobs.example"


def test_list_shows_name_rights_and_end_and_no_hash(file: Path) -> None:
    create(file, "one", "--days", "0")
    create(file, "old", "--certificate", "old.example")
    content = json.loads(file.read_text())
    content["identities"][1]["expires"] = "2020-01-01T00:00:00Z"
    file.write_text(json.dumps(content))
    table = run("list", "--file", file).stdout
    assert [line.split() for line in table.splitlines()] == [
        ["NAME", "BY", "EXPIRES", "RIGHTS"],
        ["one", "token", "never", "infer:*"],
        ["old", "certificate", "old.example", "2020-01-01T00:00:00+00:00", "(expired)", "infer:*"],
    ]
    assert json.loads(run("list", "--json", "--file", file).stdout)[0] == {
        "name": "one",
        "by": "token",
        "expires": None,
        "rights": ["infer:*"],
    }
    assert content["identities"][0]["sha256"] not in table


def test_revoke_removes_one(file: Path) -> None:
    token = create(file, "one").stdout.strip()
    create(file, "two")
    assert run("revoke", "one", "--file", file).exit_code == 0
    assert [entry.name for entry in read_file(file).identities] == ["two"]
    assert table_in(file).of_token(digest_of(token)) is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["create", "one", "--right", "read"], "one exists already; revoke it first"),
        (["create", "two", "--right", "write"], "rights: 'write' is not a right; must be infer:PATTERN"),
        (["create", "two", "--right", "infer"], "infer needs a pattern of model names"),
        (["create", "a b", "--right", "read"], "name: String should match pattern"),
        (["create", "two", "--right", "read", "--max-bytes", "many"], "max_bytes: "),
        (["revoke", "three"], "three does not exist; there are: one"),
    ],
)
def test_errors_leave_the_file_as_it_was(file: Path, arguments: list[str], error: str) -> None:
    create(file, "one")
    before = file.read_bytes()
    done = run(*arguments, "--file", file)
    assert done.exit_code == 1
    assert error in done.stderr
    assert done.stdout == ""
    assert file.read_bytes() == before


@pytest.mark.parametrize("command", [["list"], ["revoke", "one"]])
def test_a_file_that_does_not_exist_is_named(file: Path, command: list[str]) -> None:
    done = run(*command, "--file", file)
    assert done.exit_code == 1
    assert f"{file}: cannot be read: No such file" in done.stderr


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = create(tmp_path / "absent" / "tokens.json", "one")
    assert done.exit_code == 1
    assert "cannot be opened: No such file" in done.stderr


def test_it_runs_as_a_module_with_the_variable_of_the_server(file: Path) -> None:
    command = [sys.executable, "-m", "server.tokens", "create", "one", "--right", "read"]
    done = subprocess.run(
        command, cwd=ROOT, env={"ATTENTION_TOKENS": str(file)}, capture_output=True, text=True, check=True
    )
    assert table_in(file).of_token(digest_of(done.stdout.strip())) is not None
