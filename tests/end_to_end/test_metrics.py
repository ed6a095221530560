"""The metrics of real servers are those of docs/reference.md."""

import re

from attention_client import AttentionClient

from scripts.generate_operations_page import PAGE, SUPERVISOR
from scripts.local_server import ServerProcess
from tests.support.prometheus import page

MOST_SERIES_OF_A_MODEL = 100
FAMILY = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
DOCUMENTED = re.compile(r"^\| `(\w+)` \| (\w+) \| [^|]* \| ([\w ]+) \|", re.MULTILINE)


def test_the_metrics_of_a_server_are_those_of_the_page(
    server: ServerProcess, client: AttentionClient
) -> None:
    client.attend_text("sentence-self-attention", "Life is short")
    text, rows = page(server.metrics_port), DOCUMENTED.findall(PAGE.read_text())
    documented = {(name, kind) for name, kind, workers in rows if workers != SUPERVISOR}
    assert set(FAMILY.findall(text)) == documented
    series = re.findall(r'^attention_\w+\{.*\bmodel="sentence-self-attention"', text, re.MULTILINE)
    assert 0 < len(series) <= MOST_SERIES_OF_A_MODEL
