"""Queries of the dashboard and rules return data from a real Prometheus that scraped a real load."""

from pathlib import Path

import pytest

from scripts.check_dashboard import check, queries
from scripts.prometheus import ProgramNotFoundError, find_program
from tests.deploy.test_dashboards import rules
from tests.support.prometheus import required

LOAD_SECONDS = 24


def test_every_query_and_rule_returns_data(artifacts: Path) -> None:
    required("prometheus")
    findings = check(artifacts, LOAD_SECONDS)
    assert [each for each in findings if each.problem] == []
    assert len(findings) == len(rules()) + len(queries())


def test_variables_of_the_dashboard_are_filled_in() -> None:
    assert all("$" not in expression for _, expression in queries())


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
