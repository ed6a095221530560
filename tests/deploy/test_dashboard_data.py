"""Queries of the dashboard and rules return data from a real Prometheus that scraped a real load."""

from pathlib import Path

import pytest
from PIL import Image

from scripts.check_dashboard import check
from scripts.dashboard.panels import Query, panels
from scripts.dashboard.programs import ProgramNotFoundError, find_program
from tests.deploy.test_dashboards import rules
from tests.support.prometheus import required

LOAD_SECONDS = 24
MOST_PICTURE_BYTES = 400_000


def test_every_query_and_rule_returns_data(artifacts: Path, tmp_path: Path) -> None:
    required("prometheus")
    picture = tmp_path / "dashboard.png"
    findings = check(artifacts, LOAD_SECONDS, picture)
    assert [each for each in findings if each.problem] == []
    assert len(findings) == len(rules()) + sum(len(panel.queries) for panel in panels())
    assert picture.stat().st_size < MOST_PICTURE_BYTES
    with Image.open(picture) as image:
        assert min(image.size) > 500
        assert len(image.getcolors() or ()) > 10


def test_the_committed_picture_is_small() -> None:
    picture = Path(__file__).parents[2] / "docs/dashboard.png"
    assert picture.stat().st_size <= MOST_PICTURE_BYTES


def test_variables_of_the_dashboard_are_filled_in() -> None:
    query = Query('rate(a{job=~"$job", model=~"$model"}[$__rate_interval])', "{{le}} of {{model}}")
    assert query.expanded("10s") == 'rate(a{job=~".*", model=~".*"}[10s])'
    assert query.name({"le": "0.5", "model": "m"}) == "0.5 of m"
    assert all("$" not in each.expanded("10s") for panel in panels() for each in panel.queries)


def test_a_program_is_found_by_its_variable_or_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "prometheus"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("PROMETHEUS", str(program))
    assert find_program("prometheus") == str(program)
    monkeypatch.setenv("PROMETHEUS", str(tmp_path / "nothing"))
    with pytest.raises(ProgramNotFoundError, match="is not a program"):
        find_program("prometheus")
    monkeypatch.delenv("PROMETHEUS")
    with pytest.raises(ProgramNotFoundError, match="set PROMETHEUS to its path"):
        find_program("prometheus")
