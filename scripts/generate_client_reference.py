"""Writes docs/client.md, the reference of attention_client's public names, from their docstrings.

`python -m scripts.generate_client_reference` writes the page; with `--check` it exits with 1 if the page is
not current.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe
from attention_client import _connection
from griffe import Alias, Class, DocstringSectionKind, Function, Object, Parameter, ParameterKind

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "clients/python/src"
PAGE = ROOT / "docs/client.md"
COLUMNS = 100
HIDDEN = {"from_proto"}
GROUPS = {
    "Clients": ("AttentionClient", "AsyncAttentionClient"),
    "Encryption": ("TlsFiles",),
    "Requests of a stream": ("AttendInputs", "TokenInputs", "TextInputs", "EmbeddingInputs"),
    "Results": ("AttentionResult", "InferResult", "HeadSelection"),
    "Descriptions of models": (
        "ModelInfo",
        "TensorInfo",
        "ParityInfo",
        "CostInfo",
        "EncoderInfo",
        "PatternInfo",
    ),
    "Warnings": ("TextTruncatedWarning",),
}
HEADER = """# attention_client: reference

The public names of the Python client. `python -m scripts.generate_client_reference` generates this page from
their docstrings. [clients/python/README.md](../clients/python/README.md) introduces the client, and
[enrich.md](enrich.md) describes `attention_client.enrich`.
"""


def main() -> int:
    """Writes or checks the page and returns the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/client.md from the client's docstrings.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is not current")
    page = reference()
    if parser.parse_args().check:
        return int(PAGE.read_text() != page)
    PAGE.write_text(page)
    return 0


def reference() -> str:
    """The page's text."""
    package = griffe.load("attention_client", search_paths=[SOURCES], docstring_parser="google")
    lines = [HEADER]
    for title, names in GROUPS.items():
        lines.append(f"## {title}\n")
        for name in names:
            lines += _class(_resolved(package, name))
    _, tree, *texts = _text(package["errors"]).split("\n\n")
    lines += ["## Errors\n", _code(tree), *(f"{text}\n" for text in texts)]
    lines += _class(_resolved(package, "AttentionClientError"))
    listed = {name for names in GROUPS.values() for name in names} | {"AttentionClientError", "__version__"}
    for name in sorted({str(name) for name in package.exports or ()} - listed):
        summary = _text(_resolved(package, name)).split("\n\n")[0]
        lines.append(f"- `{name}`: {' '.join(summary.split())}")
    return "\n".join(lines).rstrip() + "\n"


def _resolved(package: Object | Alias, name: str) -> Class:
    found = _target(package[name])
    if not isinstance(found, Class):
        raise TypeError(f"{name} is not a class")
    return found


def _target(member: Object | Alias) -> Object:
    return member.final_target if isinstance(member, Alias) else member


def _class(cls: Class) -> Iterator[str]:
    """The class's signature and docstring, then those of its public methods."""
    yield f"### {cls.name}\n"
    functions = _functions(cls)
    if "__init__" in functions and "dataclass" not in cls.labels:
        yield _code(_signature(cls.name, functions["__init__"]))
    yield from _docstring(cls)
    values = {name: str(getattr(member, "value", "")) for name, member in cls.members.items()}
    if awaited := [name for name, value in values.items() if value.startswith("_awaited(")]:
        yield f"To be awaited, as those of `AttentionClient`: {', '.join(f'`{name}`' for name in awaited)}.\n"
    for name, function in functions.items():
        if not name.startswith("_") and name not in HIDDEN:
            yield f"#### {cls.name}.{name}\n"
            returns = "" if function.returns is None else f" -> {function.returns}"
            prefix = "async def" if "async" in function.labels else "def"
            yield _code(_signature(f"{prefix} {name}", function, returns))
            yield from _docstring(function)


def _functions(cls: Class) -> dict[str, Function]:
    """The class's functions, including inherited ones."""
    members = {name: _target(member) for name, member in {**cls.inherited_members, **cls.members}.items()}
    return {name: member for name, member in members.items() if isinstance(member, Function)}


def _docstring(item: Object) -> Iterator[str]:
    """The docstring's sections: text, then lists of arguments, attributes and errors."""
    if item.docstring is None:
        return
    for section in item.docstring.parsed:
        match section.kind:
            case DocstringSectionKind.text:
                yield f"{section.value}\n"
            case DocstringSectionKind.parameters | DocstringSectionKind.attributes:
                entries = [(f"`{entry.name}`", entry.description) for entry in section.value]
                yield from _list("Arguments" if section.kind.value == "parameters" else "Attributes", entries)
            case DocstringSectionKind.raises:
                yield from _list(
                    "Errors", [(f"`{entry.annotation}`", entry.description) for entry in section.value]
                )


def _list(title: str, entries: list[tuple[str, str]]) -> Iterator[str]:
    yield f"{title}:\n"
    yield "\n".join(f"- {name}: {' '.join(text.split())}" for name, text in entries) + "\n"


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _signature(start: str, function: Function, returns: str = "") -> str:
    """One line or, if that is too long, one line for each parameter."""
    items = [item for item in function.parameters if item.name != "self"]
    keywords = [index for index, item in enumerate(items) if item.kind is ParameterKind.keyword_only]
    parameters = [_parameter(item) for item in items]
    if keywords:
        parameters.insert(keywords[0], "*")
    line = f"{start}({', '.join(parameters)}){returns}"
    if len(line) <= COLUMNS:
        return line
    return f"{start}(\n" + "".join(f"    {item},\n" for item in parameters) + f"){returns}"


def _parameter(item: Parameter) -> str:
    annotation = "" if item.annotation is None else f": {item.annotation}"
    if item.default is None:
        return f"{item.name}{annotation}"
    return f"{item.name}{annotation} = {vars(_connection).get(str(item.default), item.default)}"


def _text(item: Object | Alias) -> str:
    return item.docstring.value if item.docstring else ""


if __name__ == "__main__":
    sys.exit(main())
