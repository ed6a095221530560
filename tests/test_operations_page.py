"""docs/reference.md is generated; docs/operations.md is complete where it is written by hand."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from attention_serving.server.command_line import CONFIG
from attention_serving.server.settings import Settings
from scripts.generate_operations_page import generated
from scripts.operations_tables import error_kinds, metrics

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/operations.md").read_text()
REFERENCE = (ROOT / "docs/reference.md").read_text()
ALERTS = ROOT / "deploy/dashboards/prometheus/rules/alerts.yml"


def rows(heading: str) -> list[str]:
    """First cells of the first hand-written table under a heading, without its header."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n\n| ")[1].split("\n\n")[0]
    return [line.split("|")[1].strip().strip("`") for line in section.splitlines()[2:]]


def test_the_page_is_current() -> None:
    assert generated(REFERENCE) == REFERENCE


def test_a_page_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="expected metrics, reasons, settings"):
        generated(REFERENCE.replace("<!-- metrics -->", ""))


def test_every_setting_is_documented_once() -> None:
    found = re.findall(r"^\| `--([a-z-]+)` \| `ATTENTION_([A-Z_]+)` \|", REFERENCE, re.MULTILINE)
    assert sorted(flag.replace("-", "_") for flag, _ in found) == sorted(Settings.model_fields)
    assert all(flag.replace("-", "_").upper() == variable for flag, variable in found)


@pytest.mark.parametrize("name", ["port", "metrics_port", "max_connections", "message_timeout_seconds"])
def test_a_default_is_stated_as_it_is_typed(name: str) -> None:
    (stated,) = re.findall(
        rf"^\| `--{name.replace('_', '-')}` \|[^|]*\|[^|]*\| ([^|]*) \|", REFERENCE, re.MULTILINE
    )
    settings = Settings.model_validate({"model_repository": ROOT, name: stated})
    assert getattr(settings, name) == Settings.model_fields[name].default


def test_a_setting_that_takes_text_is_not_a_number() -> None:
    units = dict(re.findall(r"^\| `--([a-z-]+)` \|[^|]*\| ([^|]*) \|", REFERENCE, re.MULTILINE))
    for name, setting in Settings.model_fields.items():
        if str in (setting.annotation, *get_args(setting.annotation)):
            assert units[name.replace("_", "-")] != "number", name


def test_every_mentioned_setting_exists() -> None:
    found = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z][a-z-]+)", PAGE)}
    assert found <= {*Settings.model_fields, CONFIG}


def test_metrics_in_the_text_exist() -> None:
    names = {name for name, *_ in metrics()}
    for name in re.findall(r"(?<!:)\battention_[a-z_]+\b", PAGE):
        known = {re.sub(r"_(bucket|sum|count)$", "", name), name} & names
        assert known or name == "attention_client", name


def test_every_reason_has_a_row_of_what_to_do() -> None:
    assert rows("Troubleshooting by reason") == [kind.reason for kind in error_kinds()]


def test_every_alert_says_what_to_do() -> None:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"]]
    headings = re.findall(r"^\| <a id=\"\w+\"></a>(Attention\w+) \| (page|ticket) \|", PAGE, re.MULTILINE)
    assert sorted(headings) == sorted((rule["alert"], rule["labels"]["severity"]) for rule in alerts)
    for rule in alerts:
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"


def test_links_to_headings_of_pages_lead_somewhere() -> None:
    for file, anchor in re.findall(r"\]\(([\w-]*\.md)?#([\w-]+)\)", PAGE):
        text = (ROOT / "docs" / file).read_text() if file else PAGE
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert anchor in re.findall(r'<a id="(\w+)">', text) or anchor in {
            re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings
        }, anchor
