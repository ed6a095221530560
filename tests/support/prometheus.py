"""What servers publish as metrics; and Prometheus' own tools, where they are installed."""

import os
import shutil
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

# By name and labels.
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def required(name: str) -> str:
    """The path of a program, on PATH or named by a variable such as PROMTOOL; skips the test without it."""
    if found := shutil.which(os.environ.get(name.upper()) or name):
        return found
    pytest.skip(f"{name} is neither on PATH nor named by the variable {name.upper()}")


def page(endpoint: int | str) -> str:
    """The metrics that an endpoint serves: a port of this machine, or HOST:PORT."""
    address = f"127.0.0.1:{endpoint}" if isinstance(endpoint, int) else endpoint
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text: str = response.read().decode()
    return text


def parse(text: str) -> Samples:
    """Every sample of a page of metrics."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(endpoint: int | str) -> Samples:
    """Every sample of an endpoint."""
    return parse(page(endpoint))


def published(registry: CollectorRegistry) -> Samples:
    """Every sample of a registry."""
    return parse(generate_latest(registry).decode())


def shows(registry: CollectorRegistry, expected: str) -> bool:
    """Whether a registry publishes these samples, in Prometheus' text format."""
    return parse(expected).items() <= published(registry).items()


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sample of this name with exactly these labels."""
    return samples[name, frozenset(labels.items())]


def calls_ended(endpoint: int | str, **wanted: str) -> float:
    """Number of calls that have ended, as an endpoint counts those with some labels."""
    return sum(
        value
        for (name, labels), value in scrape(endpoint).items()
        if name == "attention_requests_total" and wanted.items() <= labels
    )
