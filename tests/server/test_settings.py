"""Options: which source wins, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from server import cores
from server.engine.provider import Device, Provider
from server.settings import Settings
from tests.server.samples import ROOT

REPOSITORY = ["--model-repository", "models"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("ATTENTION_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is read; empty at first."""
    path = tmp_path / "server.toml"
    path.touch()
    monkeypatch.setenv("ATTENTION_CONFIG", str(path))
    return path


def settings(*flags: str) -> Settings:
    return CliApp.run(Settings, cli_args=[*REPOSITORY, *flags])


@pytest.mark.parametrize(
    ("flag", "variable", "line", "expected"),
    [
        (None, None, None, 8001),
        (None, None, "port = 3", 3),
        (None, "2", "port = 3", 2),
        ("1", "2", "port = 3", 1),
        ("1", None, "port = 3", 1),
        ("1", "2", None, 1),
    ],
    ids=["default", "file", "variable over file", "flag over both", "flag over file", "flag over variable"],
)
def test_flags_win_over_variables_and_those_over_the_file(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: str | None,
    variable: str | None,
    line: str | None,
    expected: int,
) -> None:
    if variable is not None:
        monkeypatch.setenv("ATTENTION_PORT", variable)
    if line is not None:
        file.write_text(line)
    assert settings(*(["--port", flag] if flag else [])).port == expected


def test_the_file_alone_can_say_everything(file: Path) -> None:
    file.write_text('model_repository = "elsewhere"\nmax_streams = 7\nprovider = "cuda"\n')
    found = CliApp.run(Settings, cli_args=[])
    assert (found.model_repository, found.max_streams, found.provider) == (Path("elsewhere"), 7, "cuda")


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        (["--port", "65536"], "port"),
        (["--port", "-1"], "port"),
        (["--metrics-port", "many"], "metrics_port"),
        (["--provider", "tpu"], "provider"),
        (["--log-level", "LOUD"], "log_level"),
        (["--threads", "-1"], "threads"),
        (["--workers", "0"], "workers"),
        (["--grace-seconds", "-0.5"], "grace_seconds"),
        (["--max-streams", "0"], "max_streams"),
        (["--max-batch-bytes", "0"], "max_batch_bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_a_value_out_of_its_range_is_refused(flags: list[str], option: str) -> None:
    with pytest.raises(ValidationError) as caught:
        settings(*flags)
    assert [problem["loc"] for problem in caught.value.errors()] == [(option,)]


def test_a_variable_out_of_its_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION_METRICS_PORT", "70000")
    with pytest.raises(ValidationError, match="metrics_port"):
        settings()


def test_a_file_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTENTION_CONFIG", str(tmp_path / "absent.toml"))
    with pytest.raises(SettingsError, match=r"absent\.toml: there is no such file"):
        settings()


def test_an_unknown_key_of_the_file_is_refused(file: Path) -> None:
    file.write_text("prot = 3")
    with pytest.raises(ValidationError, match="prot") as caught:
        settings()
    assert caught.value.errors()[0]["type"] == "extra_forbidden"


def run_server(*flags: str, **variables: str) -> tuple[int, str]:
    """Exit status and standard error of a server that cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "server", *flags],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_the_process_says_in_one_line_which_option_is_wrong() -> None:
    status, said = run_server(*REPOSITORY, "--port", "65536")
    assert status == 2
    assert said == "error: --port: Input should be less than or equal to 65535; found '65536'\n"


def test_the_process_says_in_one_line_which_file_it_cannot_find(tmp_path: Path) -> None:
    absent = tmp_path / "absent.toml"
    status, said = run_server(*REPOSITORY, ATTENTION_CONFIG=str(absent))
    assert status == 2
    assert said == f"error: ATTENTION_CONFIG={absent}: there is no such file\n"


def test_the_process_names_the_file_that_it_cannot_read(file: Path) -> None:
    file.write_text("port = ")
    status, said = run_server(*REPOSITORY)
    assert status == 2
    assert str(file) in said


def test_a_repository_without_models_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    status, said = run_server("--model-repository", str(tmp_path), "--port=0", "--metrics-port=0")
    assert status == 1
    assert "ERROR cannot serve reason='model repository" in said
    assert "does not contain a <name>/<version>/ folder" in said


def test_options_reach_engine_and_surface() -> None:
    found = settings(
        "--max-message-bytes=2097152",
        "--max-batch-sequences=6",
        "--max-streams=7",
        "--threads=2",
        "--host=::1",
    )
    assert (found.limits.max_result_bytes, found.limits.max_batch_sequences) == (2**21 - 2**16, 6)
    assert (found.rpc.max_message_bytes, found.rpc.max_streams, found.rpc.host) == (2**21, 7, "::1")
    assert found.device == Device(Provider.CPU, 2)


@pytest.mark.parametrize(("workers", "shared"), [(1, False), (2, True)], ids=["one", "two"])
def test_several_workers_share_the_port(workers: int, shared: bool) -> None:
    assert settings(f"--workers={workers}").rpc.share_port is shared


def test_threads_are_those_that_the_process_may_use_where_none_are_given() -> None:
    assert settings().device.threads == cores.available()
