"""Prometheus' conventions for names, types and help, checked without its tools.

The rules are those of `promtool check metrics` and of https://prometheus.io/docs/practices/naming/.
"""

import re
from collections.abc import Iterator

FAMILY = re.compile(r"^# HELP (\S+) ?(.*)\n# TYPE \1 (\w+)$", re.MULTILINE)
NAME = re.compile(r"[a-z][a-z0-9_]*")
PREFIXES = ("attention_", "process_")
# Base units are seconds, bytes and ratios.
OTHER_UNITS = re.compile(
    r"milliseconds|ms|microseconds|us|minutes|hours|days|secs?|bits|percent"
    r"|kilobytes|ki?b|megabytes|mi?b|gigabytes|gi?b"
)
TYPES = frozenset(("gauge", "counter", "histogram", "summary"))
PARTS = ("_count", "_sum", "_bucket", "_total", "_created")
# A name that has a unit has help that states it.
UNITS = ("seconds", "bytes")


def problems(text: str) -> list[str]:
    """Every violation in a page of metrics, as `metric: rule`."""
    families = FAMILY.findall(text)
    if len(families) != text.count("# TYPE "):
        return ["page: every metric has help before its type"]
    return [f"{name}: {rule}" for name, text, kind in families for rule in _broken(name, text, kind)]


def _broken(name: str, text: str, kind: str) -> Iterator[str]:
    words = set(name.split("_"))
    if not NAME.fullmatch(name):
        yield "lower case, digits and underscores only"
    if not name.startswith(PREFIXES):
        yield "begins with the name of the application"
    if any(map(OTHER_UNITS.fullmatch, words)):
        yield "base units only"
    if words & TYPES:
        yield "does not contain its type"
    if kind == "counter" and not name.endswith("_total"):
        yield "a counter ends with _total"
    if kind != "counter" and name.endswith(PARTS):
        yield "does not end like a part of another type"
    if kind not in TYPES:
        yield "has a type"
    if not (text[:1].isupper() or text[:1].isdigit()) or not text.endswith("."):
        yield "help is a sentence"
    unit = next((unit for unit in UNITS if unit in words), "")
    if unit and unit not in text and name.startswith("attention_"):
        yield f"help states the unit, {unit}"
