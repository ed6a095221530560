"""reference.md is generated, operations.md and limits.md are complete, links of all pages lead somewhere."""

import re
from pathlib import Path

import yaml
from attention_client import AttentionClient
from pydantic import ByteSize

from attention_serving.server.api import admission  # noqa: F401 - defines some of the errors
from attention_serving.server.engine.errors import EngineError
from attention_serving.server.engine.limits import MIB
from attention_serving.server.http.server import STATUSES
from attention_serving.server.process.command_line import CONFIG
from attention_serving.server.security import web_tokens  # noqa: F401 - defines others
from attention_serving.server.settings import Settings
from scripts.generate_operations_page import SUPERVISOR, generated, metrics
from scripts.local_server import ServerProcess
from tests.support import prometheus
from tests.support.checkout import tracked_files

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/operations.md").read_text()
REFERENCE = (ROOT / "docs/reference.md").read_text()
ALERTS = ROOT / "deploy/dashboards/prometheus/rules/alerts.yml"


def test_the_page_is_current() -> None:
    assert generated(REFERENCE) == REFERENCE


MOST_SERIES_OF_A_MODEL = 100
FAMILY = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
DOCUMENTED = re.compile(r"^\| `(\w+)` \| (\w+) \| [^|]* \| ([\w ]+) \|", re.MULTILINE)


def test_the_metrics_of_a_server_are_those_of_the_page(
    server: ServerProcess, client: AttentionClient
) -> None:
    client.attend_text("sentence-self-attention", "Life is short")
    text = prometheus.page(server.metrics_port)
    documented = {
        (name, kind) for name, kind, workers in DOCUMENTED.findall(REFERENCE) if workers != SUPERVISOR
    }
    assert set(FAMILY.findall(text)) == documented
    series = re.findall(r'^attention_\w+\{.*\bmodel="sentence-self-attention"', text, re.MULTILINE)
    assert 0 < len(series) <= MOST_SERIES_OF_A_MODEL


def test_every_mentioned_setting_exists() -> None:
    found = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z][a-z-]+)", PAGE)}
    assert found <= {*Settings.model_fields, CONFIG}


def test_metrics_in_the_text_exist() -> None:
    names = {name for name, *_ in metrics()}
    for name in re.findall(r"(?<!:)\battention_[a-z_]+\b", PAGE):
        known = {re.sub(r"_(bucket|sum|count)$", "", name), name} & names
        assert known or name == "attention_client", name


def errors_below(parent: type[EngineError]) -> list[type[EngineError]]:
    """A class of errors, and all that are derived from it."""
    return [parent, *(error for child in parent.__subclasses__() for error in errors_below(child))]


def test_every_reason_has_a_row_with_its_status_and_what_to_do() -> None:
    """Clients rely on codes and reasons: the page states them, and errors have no other ones."""
    found = re.findall(r"^\| `([A-Z_]+)` \| `([A-Z_]+)`, (\d+) \| .+ \| .+ \|$", PAGE, re.MULTILINE)
    statuses = {
        (error.reason, error.code.name, str(STATUSES.get(error.code.name, 500)))
        for error in errors_below(EngineError)
    }
    assert found == sorted(statuses)


def test_every_alert_says_what_to_do() -> None:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"]]
    headings = re.findall(r"^\| <a id=\"\w+\"></a>(Attention\w+) \| (page|ticket) \|", PAGE, re.MULTILINE)
    assert sorted(headings) == sorted((rule["alert"], rule["labels"]["severity"]) for rule in alerts)
    for rule in alerts:
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a link to a part of a page can name."""
    text = prose(page)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="(\w+)">', text))


def test_the_links_of_pages_lead_somewhere() -> None:
    pages = [ROOT / path for path in tracked_files("*.md")]
    assert len(pages) > 30
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page)):
            file, _, anchor = target.partition("#")
            linked = page.parent / file if file else page
            assert linked.exists(), (page.name, target)
            assert not anchor or anchor in anchors(linked), (page.name, target)


# Settings that bound something, by their names.
LIMIT = re.compile(r"max_.*|(?!repository_poll|canary).*_seconds")


def stated(default: object) -> str:
    """A default as the page writes it."""
    if isinstance(default, ByteSize) and default:
        return f"{default // MIB} MiB"
    return f"{default:,g}" if isinstance(default, int | float) else str(default)


def test_the_page_of_limits_states_every_limit_and_its_default() -> None:
    page = (ROOT / "docs/limits.md").read_text()
    stated_defaults = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE)
    for name, field in Settings.model_fields.items():
        if LIMIT.fullmatch(name):
            (found,) = (default for limit, default in stated_defaults if limit == name)
            assert found.startswith(stated(field.default)), name
