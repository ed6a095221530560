"""Writes docs/client.md, the reference of attention_client's public names, from their docstrings.

`python -m scripts.generate_client_reference` writes the page, and a test compares it.
"""

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

import griffe
from attention_client._connection import settings
from griffe import Alias, DocstringSectionKind, Function, Object, Parameter, ParameterKind

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "clients/python/src"
PAGE = ROOT / "docs/client.md"
COLUMNS, PAGE_COLUMNS = 100, 150
HIDDEN = {"from_proto"}
MADE_BY_CALLS = {"Context"}
GROUPS = {
    "Clients": "AttentionClient AsyncAttentionClient",
    "Encryption": "TlsFiles",
    "Stored contexts": "Context",
    "Requests of a stream": "AttendInputs TokenInputs TextInputs EmbeddingInputs",
    "Results": "AttentionResult Embeddings SparseVector InferResult Ranking HeadSelection",
    "Descriptions of models": "ModelInfo TensorInfo ParityInfo CostInfo EncoderInfo ClassifierInfo "
    "PatternInfo",
    "Warnings": "TextTruncatedWarning",
}
TITLES = {
    DocstringSectionKind.parameters: "Arguments",
    DocstringSectionKind.attributes: "Attributes",
    DocstringSectionKind.raises: "Errors",
}
HEADER = """# attention_client: reference

The public names of the Python client. `python -m scripts.generate_client_reference` generates this page from
their docstrings. [clients/python/README.md](../clients/python/README.md) introduces the client, and
[enrich.md](enrich.md) describes `attention_client.enrich`.
"""


def reference() -> str:
    """The page's text."""
    package = griffe.load("attention_client", search_paths=[SOURCES], docstring_parser="google")
    classes = {name: _target(package[name]) for name in sorted(map(str, package.exports or ()))}
    lines = [HEADER]
    for title, names in GROUPS.items():
        lines.append(f"## {title}\n")
        for name in names.split():
            lines += _class(classes.pop(name))
    _, tree, *texts = _text(_target(package["errors"])).split("\n\n")
    lines += ["## Errors\n", _code(tree), *(f"{text}\n" for text in texts)]
    lines += _class(classes.pop("AttentionClientError"))
    for name, member in classes.items():
        if name != "__version__":
            lines.append(f"- `{name}`: {' '.join(_text(member).split(chr(10) * 2)[0].split())}")
    return "\n".join(map(_wrap, "\n".join(lines).rstrip().split("\n"))) + "\n"


def _wrap(line: str) -> str:
    """Breaks a long item of a list."""
    indent = "  " if line.startswith("- ") else ""
    lines = wrap(line, PAGE_COLUMNS, subsequent_indent=indent, break_on_hyphens=False)
    return line if len(line) <= PAGE_COLUMNS else "\n".join(lines)


def _target(member: Object | Alias) -> Object:
    return member.final_target if isinstance(member, Alias) else member


def _class(cls: Object) -> Iterator[str]:
    """The class's signature and docstring, then those of its public methods, inherited ones included."""
    yield f"### {cls.name}\n"
    members = {name: _target(member) for name, member in {**cls.inherited_members, **cls.members}.items()}
    functions = {name: member for name, member in members.items() if isinstance(member, Function)}
    if "__init__" in functions and "dataclass" not in cls.labels and cls.name not in MADE_BY_CALLS:
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


def _docstring(item: Object) -> Iterator[str]:
    """The docstring's sections: text, then lists of arguments, attributes and errors."""
    for section in item.docstring.parsed if item.docstring else ():
        if section.kind is DocstringSectionKind.text:
            yield f"{section.value}\n"
        elif title := TITLES.get(section.kind):
            yield f"{title}:\n"
            key = "annotation" if title == "Errors" else "name"
            entries = [(getattr(entry, key), " ".join(entry.description.split())) for entry in section.value]
            yield "\n".join(f"- `{name}`: {text}" for name, text in entries) + "\n"


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
    text = item.name if item.annotation is None else f"{item.name}: {item.annotation}"
    if item.default is None:
        return text
    return f"{text} = {vars(settings).get(str(item.default), item.default)}"


def _text(item: Object) -> str:
    return item.docstring.value if item.docstring else ""


if __name__ == "__main__":
    PAGE.write_text(reference())
