"""The figures of README.md and docs/performance.md are those of the files in benchmarks/results."""

import re
from collections.abc import Callable, Iterator

import pytest

from scripts.local_server import ROOT

RESULTS = ROOT / "benchmarks/results"
SERVICE, PEERS = "service, attention.v1", ("Triton, 2 x 1 thread", "Triton, 1 x 2 threads")
Row = dict[str, str]


def read_tables(text: str) -> Iterator[list[Row]]:
    """Rows by column. The first column has the name `case`; bold type is left out."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = table.replace("**", "").splitlines()
        header, _, *rows = (re.split(r"\s*\|\s*", line)[1:-1] for line in lines)
        yield [dict(zip(["case", *header[1:]], row, strict=True)) for row in rows]


def read_figures(page: str, title: str) -> list[list[Row]]:
    """The tables of a section of a page."""
    _, text = (ROOT / page).read_text().split(f"\n## {title}\n")
    return list(read_tables(text.partition("\n## ")[0]))


def number(text: str) -> float:
    return float(text.replace(",", ""))


RATES, LATENCIES, *_ = (
    {row["case"]: row for row in table} for table in read_tables((RESULTS / "report.md").read_text())
)
TABLES: list[tuple[int, dict[str, Row], Callable[..., float]]] = [(0, RATES, max), (1, LATENCIES, min)]


def test_rates_in_readme_are_those_of_the_report() -> None:
    rows = [row for row in read_figures("README.md", "How it compares")[0] if row["case"] in RATES]
    assert len(rows) == 7
    for row in rows:
        rates = RATES[row["case"]]
        assert row["this project"] == rates[SERVICE]
        assert row["Triton Inference Server"] == max((rates[peer] for peer in PEERS), key=number)


@pytest.mark.parametrize(("at", "measured", "best"), TABLES, ids=["rates", "latencies"])
def test_figures_of_performance_are_those_of_the_report(
    at: int, measured: dict[str, Row], best: Callable[..., float]
) -> None:
    rows = read_figures("docs/performance.md", "What to expect")[at]
    assert len(rows) >= 3
    for row in rows:
        expected = measured[row["case"]]
        *columns, ratio = list(row)[1:]
        assert {SERVICE, *PEERS} <= set(columns)
        assert [row[name] for name in columns] == [expected[name] for name in columns]
        measured_ratio = number(row[SERVICE]) / best(number(row[peer]) for peer in PEERS)
        assert number(row[ratio]) == pytest.approx(measured_ratio, abs=0.006)


@pytest.mark.parametrize(("at", "results", "row"), [(0, "cuda.md", "NVIDIA GPUs"), (1, "encoders.md", "")])
def test_other_figures_in_readme_are_in_the_results(at: int, results: str, row: str) -> None:
    rows = [r for r in read_figures("README.md", "How it compares")[at] if r["case"].startswith(row)]
    text = re.sub(r"\(.*?\)|H100|128 x 768", "", " ".join(cell for r in rows for cell in [*r.values()][1:]))
    figures = set(re.findall(r"\d[\d,.]*\d", text))
    assert figures
    assert figures <= set(re.findall(r"\d[\d,.]*\d", (RESULTS / results).read_text()))
