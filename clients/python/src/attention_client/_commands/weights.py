"""The command `weights`: prints attention weights, draws them, or writes a page that explores them.

The page is one HTML file that loads nothing: _explorer.html, built from clients/explorer of the repository.
Servers have it at /explore.

Notation: L layers, H heads, Tq query rows, Tk key rows.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from attention_client._commands.arrays import read_array, read_token_ids
from attention_client._commands.compute import INPUTS, OUTPUT, Array
from attention_client._commands.session import ModelName, ModelVersion, Session, fail, option
from attention_client._commands.tables import print_json, token_labels, weights_table
from attention_client._models import PatternInfo
from attention_client._values import AnyResult, FloatArray

PictureFile = Annotated[Path | None, option(metavar="FILE", panel=OUTPUT)]
Number = Annotated[int | None, option(metavar="N", panel=OUTPUT, min=0)]
# Where the page expects the answers. A page that a server serves has none.
_PLACE = '<script type="application/json" id="answers"></script>'
# What the page of a server may ask; a file makes no requests.
_REQUESTS = "connect-src 'self'; "
# More rows make unreadable pictures and slow pages.
MAX_ROWS = 256
MAX_WEIGHTS = 1 << 24


def weights(
    session: Session,
    *,
    model: ModelName,
    version: ModelVersion = "",
    text: Annotated[str | None, option(metavar="TEXT", panel=INPUTS)] = None,
    ids: Array = None,
    query: Array = None,
    key: Array = None,
    value: Array = None,
    mask: Array = None,
    head: Number = None,
    layer: Number = None,
    plot: PictureFile = None,
    html: PictureFile = None,
    compare: Annotated[str | None, option(metavar="NAME", panel=OUTPUT)] = None,
    compare_version: Annotated[str, option(metavar="N", panel=OUTPUT)] = "",
) -> None:
    """Print or draw the attention weights of a text, of token ids or of vectors, or write a page of them.

    Options:
        text: Text whose words attend to each other.
        ids: In place of a text: token ids of one sequence, as `tokens` reads them.
        query: In place of a text: (Tq, d) vectors: a .npy, .npz or JSON file, - for standard input, or a JSON
            list.
        key: Keys (Tk, d), for cross-attention.
        value: Values (Tk, d), for models that separate them from the keys.
        mask: Booleans, true = may attend: (Tk,), (Tq, Tk) or (H, Tq, Tk).
        head: Only this head, from 0. Default: all.
        layer: Of a text encoder: this layer, from 0. Default: the last.
        plot: Draw heat maps to this file (.png, .svg, .pdf); needs the extra plot.
        html: Write a page that explores all layers and heads to this file; prints no weights.
        compare: With --html: show the differences to this model as well.
        compare_version: Version of --compare. Default: the highest that is ready.
    """
    if (compare is not None or compare_version) and html is None:
        raise typer.BadParameter("--compare needs --html", param_hint="--compare")
    if html is not None and any(option is not None for option in (plot, head, layer)):
        raise typer.BadParameter("a page has all layers and heads: leave out --plot, --head and --layer")
    heat_maps = None if plot is None else _heat_maps()  # before the server computes in vain
    inputs = _read_inputs(text=text, ids=ids, query=query, key=key, value=value, mask=mask)
    result = _compute(session, model, version, inputs)
    if html is not None:
        results = [result]
        if compare is not None or compare_version:
            results.append(_compute(session, compare or model, compare_version, inputs))
        _write_page(session, results, inputs, html)
        return
    matrices = _choose_layer(np.asarray(result.attention_weights), layer)
    _check("--head", head, len(matrices))
    heads = list(range(len(matrices))) if head is None else [head]
    labels = _labels(inputs, result, matrices.shape[-1])
    if heat_maps is not None:
        if matrices.shape[1] != matrices.shape[2]:
            fail("--plot draws as many queries as keys; --html draws any number")
        figure = heat_maps.draw(matrices[heads], heads, labels, _title(result))
        figure.savefig(plot, dpi=heat_maps.DPI, bbox_inches="tight")  # a long title widens the picture
    if session.json:
        answer = {"model_name": result.model_name, "model_version": result.model_version, "labels": labels}
        print_json({**answer, "heads": {str(index): matrices[index].tolist() for index in heads}})
        return
    typer.echo(f"{_subject(inputs)}  {matrices.shape}, {_title(result)}; rows are queries, columns keys")
    rows = _labels(inputs, result, matrices.shape[1])
    for index in heads:
        typer.echo(f"\nhead {index}\n{weights_table(labels, matrices[index], rows)}", nl=False)


def _read_inputs(**options: str | None) -> dict[str, Any]:
    """What attends: the text, the ids or the arrays of one sequence.

    Raises:
        typer.BadParameter: There is not exactly one of text, ids and query, or it is not one sequence.
    """
    inputs: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    sources = inputs.keys() & {"text", "ids", "query"}
    if len(sources) != 1:
        raise typer.BadParameter("give one of --text, --ids and --query")
    if sources != {"query"} and inputs.keys() & {"key", "value"}:
        raise typer.BadParameter("--key and --value need --query")
    return {name: value if name == "text" else _read(f"--{name}", value) for name, value in inputs.items()}


def _read(option: str, value: str) -> Any:
    """The array of one sequence."""
    array = np.asarray(read_token_ids(option, value) if option == "--ids" else read_array(option, value))
    if option == "--mask":
        return array
    rank = 1 if option == "--ids" else 2
    if array.ndim == rank + 1 and len(array) == 1:
        array = array[0]
    if array.ndim != rank:
        message = f"{value}: has {array.ndim} axes; one sequence has {rank}"
        raise typer.BadParameter(message, param_hint=option)
    return array


def _compute(session: Session, model: str, version: str, inputs: dict[str, Any]) -> AnyResult:
    """The result of one sequence, with weights (H, Tq, Tk), or (L, H, Tq, Tk) of a text encoder."""
    options: dict[str, Any] = {"mask": None, "version": version, "return_weights": True, **inputs}
    if "text" in inputs:
        result: AnyResult = session.client.attend_text(model, return_offsets=True, **options)
    elif "ids" in inputs:
        result = session.client.attend_tokens(model, options.pop("ids"), **options)
    else:
        result = session.client.attend(model, **options)
    if result.attention_weights is None:
        fail(f"model {result.model_name!r} does not return attention weights")
    return result


def _title(result: AnyResult) -> str:
    return f"{result.model_name}, version {result.model_version}"


def _write_page(session: Session, results: list[AnyResult], inputs: dict[str, Any], path: Path) -> None:
    models = [session.client.model(result.model_name, result.model_version) for result in results]
    answers = [
        page_answer(result, inputs, model.attention_patterns)
        for result, model in zip(results, models, strict=True)
    ]
    size = save(answers, path)
    names = " and ".join(map(_title, results))
    if session.json:
        print_json({"html": str(path), "bytes": size})
    else:
        typer.echo(f"{path}: {size} bytes, {names}")


def _subject(inputs: Mapping[str, Any]) -> str:
    if "text" in inputs:
        return str(inputs["text"])
    return ", ".join(f"{name} {value.shape}" for name, value in inputs.items())


def _labels(inputs: Mapping[str, Any], result: AnyResult, count: int) -> list[str]:
    """One label for each row: the characters of a token, its id, or its number.

    Special tokens, which have no characters, are dots.
    """
    offsets: Any = result.offsets
    if offsets is not None and len(offsets) == count:
        return token_labels(inputs["text"], offsets)
    if "ids" in inputs and len(inputs["ids"]) == count:
        return list(map(str, inputs["ids"].tolist()))
    return [str(index) for index in range(count)]


def _choose_layer(weights: FloatArray, layer: int | None) -> FloatArray:
    """(H, Tq, Tk): the weights of one layer, if the model has layers."""
    if weights.ndim == 3:  # noqa: PLR2004 - without layers
        if layer is not None:
            fail("--layer: the model is a single attention module")
        return weights
    _check("--layer", layer, len(weights))
    matrices: FloatArray = weights[-1 if layer is None else layer]
    return matrices


def _check(option: str, chosen: int | None, count: int) -> None:
    if chosen is not None and chosen >= count:
        fail(f"{option}: expected 0 to {count - 1}; found {chosen}")


def _heat_maps() -> ModuleType:
    try:
        return import_module("attention_client._commands.heat_maps")
    except ModuleNotFoundError as error:
        fail(f"--plot needs {error.name}: install attention-client with its extra 'plot'")


def page_answer(
    result: AnyResult, inputs: Mapping[str, Any], patterns: Sequence[PatternInfo]
) -> dict[str, Any]:
    """The weights that one model computed, as the page reads them.

    Args:
        result: With weights (H, Tq, Tk), or (L, H, Tq, Tk) of a text encoder.
        inputs: What attends, by name, and the mask of the request if it has one.
        patterns: The model's own rule for each layer.

    Raises:
        ValueError: There are too many rows or weights.
    """
    weights: FloatArray = np.asarray(result.attention_weights, "<f4")
    weights = weights.reshape(-1, *weights.shape[-3:])
    layers, heads, *lengths = weights.shape
    if max(lengths) > MAX_ROWS or weights.size > MAX_WEIGHTS:
        raise ValueError(
            f"--html: {max(lengths)} rows and {weights.size} weights; a page draws at most {MAX_ROWS} rows "
            f"and {MAX_WEIGHTS} weights: shorten the input"
        )
    queries, keys = (_labels(inputs, result, length) for length in lengths)
    mask = None if inputs.get("mask") is None else np.asarray(inputs["mask"], bool)
    bits = None if mask is None else _base64(np.packbits(mask, bitorder="little"))
    return {
        "model": result.model_name,
        "version": result.model_version,
        "subject": _subject(inputs),
        "queries": queries,
        "keys": keys,
        "layers": layers,
        "heads": heads,
        "patterns": [asdict(pattern) for pattern in patterns],
        "mask": None if mask is None else {"shape": list(mask.shape), "bits": bits},
        "weights": _base64(weights),
    }


def save(answers: Sequence[dict[str, Any]], path: Path) -> int:
    """Writes the page of one answer, or of two and their difference, and returns its size in bytes.

    Raises:
        OSError: The file cannot be written.
    """
    # In a script element, only "<" could be taken for markup.
    data = json.dumps(answers, ensure_ascii=False).replace("<", "\\u003c")
    page = files("attention_client").joinpath("_explorer.html").read_text(encoding="utf-8")
    filled = page.replace(_REQUESTS, "", 1).replace(_PLACE, _PLACE.replace("></", f">{data}</"), 1)
    return path.write_bytes(filled.encode(errors="replace"))


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()
