"""Command line: `python -m export PRESET --out REPO`; or `--weights FILE` or `--encoder FOLDER` for PRESET.

Checks the usage without PyTorch, which takes seconds to import; `export.command` does the work. Exit status:
0 if the export succeeded, 1 if it failed, 2 if the command was used wrongly.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from attention_serving.artifact.keys import KeyFileError
from attention_serving.artifact.names import ModelId
from attention_serving.export import VERSION, options
from attention_serving.export.errors import ExportError
from attention_serving.export.options import Source
from attention_serving.export.precision import Precision
from attention_serving.model.checkpoints.layouts import LAYOUTS
from attention_serving.model.config import POOLINGS
from attention_serving.model.presets import PRESETS

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
USAGE_ERROR, FAILURE = 2, 1
# Names in errors that are not those of the parameters.
OPTIONS = {"preset": "a preset", "truncates": "--truncate"}


@app.command()
def export(
    preset: options.Preset = "",
    *,
    list_presets: options.ListPresets = False,
    describe: options.Describe = False,
    tool_version: options.ToolVersion = False,
    weights: options.Weights = None,
    encoder: options.Encoder = None,
    seed: options.Seed = None,
    layout: options.Layout = "",
    prefix: options.Prefix = "",
    heads: options.Heads = None,
    causal: options.Causal = False,
    cross: options.Cross = False,
    rotary_theta: options.RotaryTheta = None,
    pooling: options.EncoderPooling = "",
    dimensions: options.Dimensions = None,
    truncate: options.Truncate = False,
    reference: options.ComparedWith = None,
    trust_remote_code: options.TrustRemoteCode = False,
    out: options.Out = None,
    name: options.Name = "",
    version: options.Version = 1,
    replace: options.Replace = False,
    sign_key: options.SignKey = None,
    targets: options.Targets = None,
    precision: options.ElementType = Precision.FP32,
    rtol: options.RelativeTolerance = None,
    atol: options.AbsoluteTolerance = None,
    cosine: options.SmallestCosine = None,
) -> None:
    """Export an attention module or a text encoder into a model repository; compare it with eager PyTorch."""
    if tool_version:
        console.print(VERSION)
        return
    if list_presets:
        _print_presets()
        return
    checkpoint = _given(layout=layout, prefix=prefix, heads=heads, causal=causal, cross=cross)
    checkpoint |= _given(rotary_theta=rotary_theta)
    text = _given(pooling=pooling, dimensions=tuple(dimensions or ()), truncates=truncate)
    text |= _given(reference=reference, trust_remote_code=trust_remote_code)
    if encoder is not None:
        source = _encoder(encoder, text, _given(preset=preset, weights=weights, seed=seed) | checkpoint)
    elif text:
        _refuse(f"{_names(text)} needs --encoder")
    elif weights is not None:
        source = _checkpoint(weights, preset, seed, checkpoint)
    else:
        source = _preset(preset, seed, checkpoint)
    if describe:
        with _failures_in_one_line():
            from attention_serving.export import command  # noqa: PLC0415 - imports PyTorch

            command.describe(source, console)
        return
    if not (name or preset):
        _refuse("--name is missing: give the name of the model")
    try:
        model = ModelId(name or preset, version)
    except ValueError as error:
        _refuse(str(error))
    if out is None:
        _refuse("--out is missing: give the model repository to write into")
    with _failures_in_one_line():
        from attention_serving.export import command  # noqa: PLC0415 - imports PyTorch

        command.run(
            source,
            model,
            out,
            precision,
            rtol=rtol,
            atol=atol,
            cosine=cosine,
            replace=replace,
            sign_key=sign_key,
            targets=targets or (),
            console=console,
        )


def _given(**values: Any) -> dict[str, Any]:
    """The options that were given; 0 is a value."""
    return {name: own for name, own in values.items() if own or (own == 0 and own is not False)}


def _names(given: Mapping[str, Any]) -> str:
    return ", ".join(OPTIONS.get(name, f"--{name.replace('_', '-')}") for name in given)


def _preset(preset: str, seed: int | None, given: Mapping[str, Any]) -> Source:
    if not preset:
        _refuse("name a preset (--list shows them), or give --weights or --encoder")
    if preset not in PRESETS:
        _refuse(f"preset {preset!r} does not exist; --list shows those that do")
    if given:
        _refuse(f"{_names(given)} needs --weights; a preset has its own configuration")
    return Source(preset=preset, options={"seed": options.PRESET_SEED if seed is None else seed})


def _checkpoint(weights: Path, preset: str, seed: int | None, given: Mapping[str, Any]) -> Source:
    if preset:
        _refuse(f"preset {preset!r} and --weights exclude each other; give one of them")
    if seed is not None:
        _refuse("--seed needs a preset; with --weights, the checkpoint contains the weights")
    layouts = ", ".join(sorted(LAYOUTS))
    if "layout" not in given:
        _refuse(f"--layout is missing: give one of {layouts}")
    if given["layout"] not in LAYOUTS:
        _refuse(f"layout {given['layout']!r} does not exist; the layouts are: {layouts}")
    if "heads" not in given:
        _refuse("--heads is missing: give the number of query heads")
    if "rotary_theta" in given and not LAYOUTS[given["layout"]].rotary:
        _refuse(f"--rotary-theta: layout {given['layout']!r} has no rotary embedding")
    return Source(weights=weights, options=given)


def _encoder(folder: Path, given: Mapping[str, Any], others: Mapping[str, Any]) -> Source:
    if others:
        _refuse(f"--encoder and {_names(dict([*others.items()][:1]))} exclude each other; give one of them")
    if "pooling" in given and given["pooling"] not in POOLINGS:
        _refuse(f"--pooling {given['pooling']!r} does not exist; give one of {', '.join(POOLINGS)}")
    return Source(encoder=folder, options=given)


@contextmanager
def _failures_in_one_line() -> Iterator[None]:
    """Ends the command with one line and its status if an expected failure occurs."""
    try:
        yield
    except (ExportError, KeyFileError, OSError, ValueError) as error:
        errors.print(f"error: {error}")
        raise typer.Exit(FAILURE) from None


def _print_presets() -> None:
    table = Table("preset", "description", box=None, pad_edge=False)
    for name, preset in PRESETS.items():
        table.add_row(name, preset.description)
    console.print(table)


def _refuse(message: str) -> NoReturn:
    """Ends with the status of a wrong usage."""
    errors.print(f"error: {message}")
    raise typer.Exit(USAGE_ERROR)


if __name__ == "__main__":
    app()
