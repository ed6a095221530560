"""The checks of the conventions for metrics find what breaks them."""

import pytest

from tests.support.metric_conventions import problems
from tests.support.prometheus import check_metrics


@pytest.mark.parametrize(
    ("line", "kind", "text", "rule"),
    [
        ("attention_Calls 1", "gauge", "Calls.", "lower case, digits and underscores only"),
        ("calls 1", "gauge", "Calls.", "begins with the name of the application"),
        ("attention_wait_milliseconds 1", "gauge", "Wait in milliseconds.", "base units only"),
        ("attention_calls_gauge 1", "gauge", "Calls.", "does not contain its type"),
        ("attention_calls_count 1", "gauge", "Calls.", "does not end like a part of another type"),
        ("attention_calls 1", "counter", "Calls.", "a counter ends with _total"),
        ("attention_calls 1", "untyped", "Calls.", "has a type"),
        ("attention_calls 1", "gauge", "", "help is a sentence"),
        ("attention_calls 1", "gauge", "calls", "help is a sentence"),
        ("attention_wait_seconds 1", "gauge", "How long calls wait.", "help states the unit, seconds"),
    ],
)
def test_a_violation_is_found(line: str, kind: str, text: str, rule: str) -> None:
    name = line.split(maxsplit=1)[0]
    found = problems(f"# HELP {name} {text}\n# TYPE {name} {kind}\n{line}\n")
    assert rule in [each.split(": ")[1] for each in found]


def test_promtool_finds_what_is_wrong(promtool: str) -> None:
    wrong = "# HELP attention_wait_milliseconds Wait.\n# TYPE attention_wait_milliseconds counter\n"
    found = check_metrics(promtool, f"{wrong}attention_wait_milliseconds 1\n")
    assert "attention_wait_milliseconds" in found
