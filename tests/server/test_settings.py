"""Options of the server: precedence of their sources, accepted values, and errors."""

import logging
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from attention_serving.server import VERSION, machine
from attention_serving.server.engine.limits import MIB, UNLIMITED
from attention_serving.server.engine.run.provider import Device, Provider
from attention_serving.server.errors import ServerError
from attention_serving.server.process import application
from attention_serving.server.process.command_line import create_command, unknown_variables
from attention_serving.server.security.tls import TlsFiles
from attention_serving.server.settings import SECTIONS, SPIN_SECONDS, Settings
from attention_serving.server.transport.create import channel_options
from tests.server.engine.run.test_session import WITHOUT_CUDA

REPOSITORY = ["--model-repository", "models"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("ATTENTION_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration file, which is empty at first."""
    path = tmp_path / "server.toml"
    path.touch()
    monkeypatch.setenv("ATTENTION_CONFIG", str(path))
    return path


def run(*flags: str) -> tuple[Result, list[Settings]]:
    """Runs the command in this process; returns how it ended, and the settings if they were valid."""
    found: list[Settings] = []

    def serve(settings: Settings) -> int:
        found.append(settings)
        return 0

    return CliRunner().invoke(create_command(serve), [*flags]), found


def settings(*flags: str) -> Settings:
    result, found = run(*REPOSITORY, *flags)
    assert result.exit_code == 0, result.output
    return found[0]


def errors(*flags: str) -> list[str]:
    """The lines that the command ends with if a value is invalid."""
    result, found = run(*flags)
    assert (result.exit_code, result.stdout, found) == (2, "", [])
    return result.stderr.splitlines()


@pytest.mark.parametrize(
    ("flag", "variable", "line", "expected"),
    [
        ("", None, "", 8001),
        ("", None, "port = 3", 3),
        ("", "2", "port = 3", 2),
        ("", "", "port = 3", 3),
        ("--port=1", "2", "port = 3", 1),
        ("--port=8001", "2", "", 8001),
    ],
    ids=["default", "file", "variable", "empty variable", "flag", "flag with the default"],
)
def test_precedence_of_sources(
    file: Path, monkeypatch: pytest.MonkeyPatch, flag: str, variable: str | None, line: str, expected: int
) -> None:
    if variable is not None:
        monkeypatch.setenv("ATTENTION_PORT", variable)
    file.write_text(f'{line}\nmodel_repository = "elsewhere"')
    monkeypatch.setenv("ATTENTION_CONFIG", "absent")
    _, (found,) = run(f"--config={file}", *flag.split())  # which takes precedence over its variable
    assert (found.port, found.model_repository) == (expected, Path("elsewhere"))


def test_every_option_can_be_set_with_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model_repository": "r", "host": "::1", "provider": "cuda", "log_level": "DEBUG"}
    values |= {"log_format": "json", "transport": "threaded", "max_memory": "1GiB", "latency": "lowest"}
    values |= {"model_control": "poll", "load_model": "m", "version_policy": "latest", "insecure": "true"}
    values |= {"log_requests": "all", "protect_metrics": "true", "http_explore": "true"}
    values |= {"refuse_token_ids": "true", "audit_fraction": "0.5", "alias": "a/b=c"}
    one_process = {"unix_socket", "allow_shared_memory"}  # which need a single worker
    names = [name for name in Settings.model_fields if name not in one_process]
    for name in names:
        value = values.get(name, "2097152" if "bytes" in name else "7")
        monkeypatch.setenv(f"ATTENTION_{name.upper()}", value)
    _, (found,) = run()
    defaults = Settings.model_validate({"model_repository": "models"})
    assert [name for name in names if getattr(found, name) == getattr(defaults, name)] == []


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--unix-socket=/s --workers=2", "--unix-socket /s: needs a single worker; set workers to 1 (Path"),
        ("--allow-shared-memory --workers=2", "--allow-shared-memory: needs a single worker"),
        ("--model-control=explicit --workers=2", "--model-control explicit: needs a single worker, because"),
        ("--workers=0", "--workers 0: 0 is one worker for each GPU; set provider to cuda or auto (Number"),
        ("--protect-metrics", "--protect-metrics: needs identities; set tokens or jwt_jwks"),
        ("--http-explore", "--http-explore: needs HTTP; set http_port (Serve"),
        ("--tls-certificate=c", "--tls-key: is needed with tls_certificate, and"),
        ("--tls-key=k", "--tls-key k: is needed with tls_certificate, and"),
        ("--tls-client-ca=a", "--tls-client-ca a: needs tls_certificate and tls_key too (PEM file"),
        ("--jwt-jwks=j --jwt-issuer=i", "--jwt-jwks j: needs jwt_issuer and jwt_audience (Public"),
        ("--worker-timeout-seconds=1", "--worker-timeout-seconds 1: must be 0, or at least 2"),
        ("--max-memory=2MiB --max-in-flight-bytes=2MiB", "--max-in-flight-bytes 2MiB: must be below max_"),
    ],
)
def test_an_option_that_needs_another_is_refused_without_it(flags: str, line: str) -> None:
    (found,) = errors(*REPOSITORY, *flags.split())
    assert found.startswith(f"error: {line}")


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--port", "65536", "less than or equal to 65535 (Port for gRPC, 0 to 65535."),
        ("--provider", "tpu", "'auto', 'cpu' or 'cuda'"),
        ("--host", "", "at least 1 character"),
        ("--worker-timeout-seconds", "inf", "finite"),
        ("--max-concurrent-calls", "0", "greater than 0"),
        ("--max-memory", "-5MiB", "must be a number of bytes or a size such as 64MiB"),
        ("--max-message-bytes", "1KiB", "1MiB to 2047MiB"),
        ("--version-policy", "newest", "newest"),
        ("--alias", "a=b,b=c", "alias 'b': must match"),
        ("--alias", "a=a", "alias 'a': must match"),
        ("--alias", "a=b,a=c", "alias 'a': must match"),
        ("--alias", "a", "a=: the name of the model must match"),
        ("--alias", "/a=b", "alias '/a': must match"),
        ("--port", "a\nerror: forged", "valid integer"),
        ("--port", "x" * 100_000, "valid integer"),
    ],
    ids=range(15),
)
def test_an_invalid_value_is_refused_on_one_bounded_line(flag: str, value: str, reason: str) -> None:
    (line,) = errors(*REPOSITORY, flag, value)
    shown = value if value.isprintable() else repr(value)
    assert line.startswith(f"error: {flag} {shown}"[:100])
    assert reason in line
    assert len(line) < 500


def test_aliases_are_flags_variables_or_a_table(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"org/a": "a", "b-1": "a"}
    assert settings("--alias", "org/a=a", "--alias", "b-1=a").alias == expected
    file.write_text('[alias]\n"org/a" = "a"\nb-1 = "a"')
    assert settings().alias == expected
    monkeypatch.setenv("ATTENTION_ALIAS", "org/a=b")
    assert settings().alias == {"org/a": "b"}
    monkeypatch.delenv("ATTENTION_ALIAS")
    for wrong in ("5", "[5]", "{a = [1]}"):
        file.write_text(f"alias = {wrong}")
        assert "alias = " in errors(*REPOSITORY)[0]


def test_an_error_names_flag_variable_or_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('port = "abc"\nthreads = -1\nworkers = 0\nmax_batch_sequences = 0')
    monkeypatch.setenv("ATTENTION_METRICS_PORT", "70000")
    monkeypatch.setenv("ATTENTION_WORKERS", "none")
    found = errors(*REPOSITORY, "--threads=many")
    assert {line.split(": input should")[0] for line in found} == {
        "error: --threads many",
        "error: ATTENTION_METRICS_PORT=70000",
        "error: ATTENTION_WORKERS=none",
        f"error: {file}: max_batch_sequences = 0",
        f'error: {file}: port = "abc"',
    }


def test_a_file_that_cannot_be_read_or_has_an_unknown_key_is_refused(file: Path, tmp_path: Path) -> None:
    (line,) = errors()
    assert line.startswith("error: --model-repository is required; ATTENTION_MODEL_REPOSITORY and model_")
    absent = tmp_path / "absent.toml"
    unreadable = "the configuration file cannot be read: "
    (line,) = errors(*REPOSITORY, f"--config={absent}")
    assert line == f"error: --config {absent}: {unreadable}No such file or directory"
    for content, error in (
        (b"port = ", f"ATTENTION_CONFIG={file}: {unreadable}"),
        (b"\xff", f"ATTENTION_CONFIG={file}: {unreadable}"),
        (b"prot = 3", f"{file}: prot = 3: unknown option; did you mean port?"),
        (b"[server]\nport = 3", f'{file}: server = {{"port": 3}}: unknown option'),
        (b"max-memory = 3", f"{file}: max-memory = 3: unknown option; did you mean max_memory?"),
    ):
        file.write_bytes(content)
        (line,) = errors(*REPOSITORY)
        assert line.startswith(f"error: {error}")


def test_unknown_variables_are_found() -> None:
    known = ["ATTENTION_PORT", "ATTENTION_CONFIG", "ATTENTION_SERVER", "PATH"]  # one is the client's
    assert unknown_variables([*known, "ATTENTION_PROT", "ATTENTION_"]) == ["ATTENTION_", "ATTENTION_PROT"]


def test_the_help_shows_every_option_in_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "100")
    result, _ = run("--help")
    positions = [result.stdout.index(f"─ {section} ─") for section in SECTIONS]
    assert positions == sorted(positions)
    for start, end, section in zip(positions, [*positions[1:], None], SECTIONS.values(), strict=True):
        for name in section.model_fields:
            assert f"--{name.replace('_', '-')} " in result.stdout[start:end]
    for shown in ("64MiB", "auto|cpu|cuda", "completion-queue|", "text|json"):
        assert shown in result.stdout
    assert re.search(r"--max-context-bytes +SIZE", result.stdout)
    assert "CHOICE" not in result.stdout
    assert run("--version")[0].stdout == f"attention-serving {VERSION}\n"


def test_options_reach_the_engine_and_the_core() -> None:
    flags = (
        "--max-message-bytes=2MiB --max-batch-sequences=6 --max-concurrent-calls=14 --threads=2 --host=::1"
    )
    found = settings(*flags.split(), "--workers=2")
    assert (found.limits.max_result_bytes, found.limits.max_batch_sequences) == (2**21 - 2**16, 6)
    assert found.max_streams == 7
    assert (
        channel_options(found)["grpc.so_reuseport"],
        channel_options(settings())["grpc.so_reuseport"],
    ) == (1, 0)
    assert found.device == Device(Provider.CPU, 2, arena_bytes=int(1.25 * found.memory_for_runs))
    files = settings("--tls-certificate=c", "--tls-key=k", "--tls-client-ca=a").tls_files
    assert files == TlsFiles(certificate=Path("c"), key=Path("k"), client_ca=Path("a"))


def test_the_lowest_latency_keeps_threads_awake_if_there_are_several() -> None:
    one, two = (settings("--latency=lowest", f"--threads={threads}") for threads in (1, 2))
    assert (two.device.spins, two.spin_seconds, one.spin_seconds) == (True, SPIN_SECONDS, 0)
    assert (settings().device.spins, settings().spin_seconds) == (False, 0)


def test_the_memory_of_the_device_bounds_the_runs_on_it() -> None:
    on_device, on_host = (settings("--device-memory=8GiB", f"--provider={name}") for name in ("cuda", "cpu"))
    assert on_device.device.memory_bytes == on_device.limits.max_run_bytes == 8 << 30
    assert on_host.limits.max_run_bytes == on_host.memory_for_runs


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (64, UNLIMITED, 256 * MIB)),
        ("--provider=cuda", (4096, 16_384, 8192 * MIB)),
        ("--provider=cuda --max-batch-tokens=0 --max-batch-sequences=9", (9, UNLIMITED, 8192 * MIB)),
        ("--max-batch-tokens=100", (64, 100, 256 * MIB)),
    ],
    ids=["on the CPU", "on CUDA", "without a limit", "as asked"],
)
def test_batches_are_larger_on_a_device(flags: str, expected: tuple[int, int, int]) -> None:
    limits = settings(*flags.split()).limits
    assert (limits.max_batch_sequences, limits.max_batch_rows, limits.max_batch_bytes) == expected


@pytest.mark.parametrize(
    ("flags", "requests", "contexts", "runs"),
    [
        (["--max-memory=3GiB", "--max-in-flight-bytes=1GiB"], 1024, 768, 1280),
        (["--max-memory=2GiB"], 512, 512, 1024),
        (["--max-memory=64GiB", "--max-context-bytes=1MiB"], 1024, 1, 63 * 1024 - 1),
        (["--max-memory=2GiB", "--max-context-bytes=0"], 512, 0, 1536),
        (["--max-memory=64MiB", "--max-in-flight-bytes=56MiB"], 56, 4, 4),
    ],
)
def test_memory_is_divided(flags: list[str], requests: int, contexts: int, runs: int) -> None:
    limits = settings(*flags).limits
    found = (limits.max_in_flight_bytes, limits.max_context_bytes, limits.max_run_bytes)
    assert found == (requests * MIB, contexts * MIB, runs * MIB)


def test_the_memory_of_the_machine_is_shared_by_workers() -> None:
    total = machine.available_bytes() // 2
    for workers in (1, 4):
        found = settings(f"--workers={workers}")
        parts = found.memory_for_requests, found.memory_for_contexts, found.memory_for_runs
        assert sum(parts) == total // workers
    large = settings("--max-in-flight-bytes", str(total))
    assert large.memory_for_runs + large.memory_for_contexts == large.memory_for_requests == total


@WITHOUT_CUDA
def test_auto_takes_the_host_if_cuda_cannot_be_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert application.resolve(given := settings("--provider=cpu")) is given
    assert not caplog.records
    found = application.resolve(settings("--provider=auto"))
    assert (found.provider, found.device.provider) == ("cpu", "cpu")
    (record,) = caplog.records
    fields = vars(record)
    assert (record.message, fields["provider"], fields["asked"]) == ("execution provider", "cpu", "auto")
    reason = "is built without CUDA; install onnxruntime-gpu in its place"
    assert reason in fields["reason"]
    with pytest.raises(ServerError, match=rf"--provider cuda: onnxruntime 1\..* {reason}"):
        application.resolve(settings("--provider=cuda"))
