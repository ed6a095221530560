"""The metrics of real servers are those of docs/reference.md."""

import re
from pathlib import Path

import pytest
from attention_client import AttentionClient

from scripts.generate_operations_page import PAGE, SUPERVISOR
from scripts.local_server import ServerProcess, serving
from tests.server.samples import TEXT
from tests.support.prometheus import check_metrics, page

MOST_SERIES_OF_A_MODEL = 100
FAMILY = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
DOCUMENTED = re.compile(r"^\| `(\w+)` \| (\w+) \| [^|]* \| ([\w ]+) \|", re.MULTILINE)


def documented(*, supervisor: bool) -> set[tuple[str, str]]:
    """Names and types of the metrics of every server in docs/reference.md, and those of a supervisor."""
    rows = DOCUMENTED.findall(PAGE.read_text())
    return {(name, kind) for name, kind, workers in rows if supervisor or workers != SUPERVISOR}


def test_the_metrics_of_a_server_are_those_of_the_page(
    server: ServerProcess, client: AttentionClient
) -> None:
    client.attend_text("sentence-self-attention", "Life is short")
    text = page(server.metrics_port)
    assert set(FAMILY.findall(text)) == documented(supervisor=False)
    series = re.findall(r'^attention_\w+\{.*\bmodel="sentence-self-attention"', text, re.MULTILINE)
    assert 0 < len(series) <= MOST_SERIES_OF_A_MODEL


def test_promtool_finds_nothing(promtool: str, server: ServerProcess) -> None:
    assert check_metrics(promtool, page(server.metrics_port)) == ""
    assert "attention_x_ms" in check_metrics(
        promtool, "# HELP attention_x_ms X.\n# TYPE attention_x_ms counter\nattention_x_ms 1\n"
    )


@pytest.mark.thorough
def test_the_metrics_of_workers_are_those_of_the_page(artifacts: Path, tmp_path: Path) -> None:
    """A metric of workers is served once it has a value in one of them."""
    with (
        serving(artifacts, tmp_path / "log", "--workers=2") as server,
        AttentionClient(server.target) as client,
    ):
        client.attend_text(TEXT, "Life is short")
        text = page(server.metrics_port)
    found, everything = set(FAMILY.findall(text)), documented(supervisor=True)
    assert everything - documented(supervisor=False) <= found <= everything
    processes = re.findall(r'^process_resident_memory_bytes\{process="([^"]+)"\} \d', text, re.MULTILINE)
    assert sorted(processes) == ["supervisor", "worker-0", "worker-1"]
