"""Command line: `python -m export PRESET --out REPO`; or `--weights FILE` or `--encoder FOLDER` for PRESET.

Checks the usage without PyTorch, which takes seconds to import; `export.command` does the work. Exit status:
0 if the export succeeded, 1 if it failed, 2 if the command was used wrongly.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from attention_serving.artifact.keys import KeyFileError
from attention_serving.export import VERSION, options
from attention_serving.export.errors import ArtifactExistsError, ExportError
from attention_serving.export.model_id import ModelId
from attention_serving.export.precision import Precision
from attention_serving.export.sources import CheckpointSource, EncoderSource, PresetSource, Source
from attention_serving.model.checkpoints.layouts import LAYOUTS
from attention_serving.model.encoder.config import POOLINGS
from attention_serving.model.presets import PRESETS

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
USAGE_ERROR, FAILURE = 2, 1


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
    out: options.Out = None,
    name: options.Name = "",
    version: options.Version = 1,
    replace: options.Replace = False,
    sign_key: options.SignKey = None,
    targets: options.Targets = None,
    precision: options.ElementType = Precision.FP32,
    rtol: options.RelativeTolerance = None,
    atol: options.AbsoluteTolerance = None,
) -> None:
    """Export an attention module or a text encoder into a model repository; compare it with eager PyTorch."""
    if tool_version:
        console.print(VERSION)
        return
    if list_presets:
        _print_presets()
        return
    checkpoint: dict[str, Any] = {"--layout": layout or None, "--prefix": prefix or None, "--heads": heads}
    checkpoint |= {"--causal": causal or None, "--cross": cross or None, "--rotary-theta": rotary_theta}
    given = {option: value for option, value in checkpoint.items() if value is not None}
    own = {"--pooling": pooling or None, "--dimensions": dimensions, "--truncate": truncate or None}
    own = {option: value for option, value in own.items() if value is not None}
    source: Source
    if encoder is not None:
        _check_alone(preset, weights, seed, given)
        source = _encoder(encoder, own)
    else:
        _check_not_given(own, "--encoder")
        source = (
            _preset(preset, seed, given) if weights is None else _checkpoint(weights, preset, seed, given)
        )
    if describe:
        from attention_serving.export import command  # noqa: PLC0415 - imports PyTorch

        _finish(lambda: command.describe(source, console))
        return
    model, repository = _model_id(name or preset, version), _repository(out)
    from attention_serving.export import command  # noqa: PLC0415 - imports PyTorch

    _finish(
        lambda: command.run(
            source,
            model,
            repository,
            precision,
            rtol=rtol,
            atol=atol,
            replace=replace,
            sign_key=sign_key,
            targets=targets or (),
            console=console,
        )
    )


def _preset(preset: str, seed: int | None, given: Mapping[str, Any]) -> PresetSource:
    if not preset:
        _refuse("name a preset (--list shows them), or give --weights or --encoder")
    if preset not in PRESETS:
        _refuse(f"preset {preset!r} does not exist; --list shows those that do")
    if given:
        _refuse(f"{', '.join(given)} needs --weights; a preset has its own configuration")
    return PresetSource(name=preset, seed=options.PRESET_SEED if seed is None else seed)


def _checkpoint(weights: Path, preset: str, seed: int | None, given: Mapping[str, Any]) -> CheckpointSource:
    if preset:
        _refuse(f"preset {preset!r} and --weights exclude each other; give one of them")
    if seed is not None:
        _refuse("--seed needs a preset; with --weights, the checkpoint contains the weights")
    layouts = ", ".join(sorted(LAYOUTS))
    if "--layout" not in given:
        _refuse(f"--layout is missing: give one of {layouts}")
    if given["--layout"] not in LAYOUTS:
        _refuse(f"layout {given['--layout']!r} does not exist; the layouts are: {layouts}")
    if "--heads" not in given:
        _refuse("--heads is missing: give the number of query heads")
    if "--rotary-theta" in given and not LAYOUTS[given["--layout"]].rotary:
        _refuse(f"--rotary-theta: layout {given['--layout']!r} has no rotary embedding")
    return CheckpointSource(
        path=weights,
        layout=given["--layout"],
        prefix=given.get("--prefix", ""),
        heads=given["--heads"],
        causal="--causal" in given,
        cross="--cross" in given,
        rotary_theta=given.get("--rotary-theta", options.ROTARY_THETA),
    )


def _check_alone(preset: str, weights: Path | None, seed: int | None, given: Mapping[str, Any]) -> None:
    """An encoder is described by its folder alone."""
    others = {"a preset": preset or None, "--weights": weights, "--seed": seed, **given}
    if named := [name for name, value in others.items() if value is not None]:
        _refuse(f"--encoder and {named[0]} exclude each other; give one of them")


def _check_not_given(options_given: Mapping[str, Any], needed: str) -> None:
    if options_given:
        _refuse(f"{', '.join(options_given)} needs {needed}")


def _encoder(folder: Path, given: Mapping[str, Any]) -> EncoderSource:
    pooling = given.get("--pooling", "")
    if pooling and pooling not in POOLINGS:
        _refuse(f"--pooling {pooling!r} does not exist; give one of {', '.join(POOLINGS)}")
    return EncoderSource(
        path=folder,
        pooling=pooling,
        dimensions=tuple(given.get("--dimensions", ())),
        truncates="--truncate" in given,
    )


def _model_id(name: str, version: int) -> ModelId:
    if not name:
        _refuse("--name is missing: give the name of the model")
    try:
        return ModelId(name, version)
    except ValueError as error:
        _refuse(str(error))


def _repository(out: Path | None) -> Path:
    if out is None:
        _refuse("--out is missing: give the model repository to write into")
    return out


def _finish(work: Callable[[], None]) -> None:
    """Runs the command; an expected failure ends it with one line and its status."""
    try:
        work()
    except (ExportError, KeyFileError, OSError, ValueError) as error:
        message = str(error)
        if isinstance(error, ArtifactExistsError):
            message = message.replace("(replace=True)", "(--replace)")
        errors.print(f"error: {message}")
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
