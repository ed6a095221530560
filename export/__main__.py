"""Command line: `python -m export PRESET --out REPO`, or `--weights FILE --layout LAYOUT` for a preset."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from artifact.manifest import Manifest
from artifact.tolerance import Tolerance
from export.artifact import ArtifactExistsError, Naming, write_artifact
from export.graph import ExportError
from export.parity import ParityError
from export.precision import TOLERANCES, Precision
from export.signature import AttentionModule
from model.checkpoints import LAYOUTS, load_checkpoint
from model.presets import PRESETS, build_preset

app = typer.Typer(add_completion=False, rich_markup_mode=None)
console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
EXAMPLE_LENGTH = 128
Value = TypeVar("Value")


@dataclass(frozen=True)
class _Chosen:
    """A module to export, and what to call it where the caller does not say."""

    module: AttentionModule
    name: str
    description: str


@app.command()
def export(
    preset: Annotated[str, typer.Argument(help="Which preset to export; --list shows them.")] = "",
    *,
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets and stop.")] = False,
    describe: Annotated[bool, typer.Option("--describe", help="Describe the module and stop.")] = False,
    out: Annotated[Path | None, typer.Option(help="Model repository to write into.")] = None,
    name: Annotated[str, typer.Option(help="Name of the model; the preset's where left out.")] = "",
    version: Annotated[int, typer.Option(min=1, help="Version of the model.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of a preset's weights.")] = 0,
    weights: Annotated[
        Path | None, typer.Option(help="Checkpoint (.safetensors, .pt) in place of a preset.")
    ] = None,
    layout: Annotated[str, typer.Option(help=f"Its layout: {', '.join(sorted(LAYOUTS))}.")] = "",
    prefix: Annotated[str, typer.Option(help="What stands before the layout's own names in it.")] = "",
    heads: Annotated[int | None, typer.Option(min=1, help="Number of query heads of the checkpoint.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Attend to no later row.")] = False,
    cross: Annotated[bool, typer.Option("--cross", help="Keys from another sequence.")] = False,
    rotary_theta: Annotated[float, typer.Option(help="Base frequency of layout llama.")] = 10_000.0,
    precision: Annotated[Precision, typer.Option(help="Element type of the graphs.")] = Precision.FP32,
    rtol: Annotated[
        float | None, typer.Option(min=0, help="Tolerated difference from eager PyTorch, relative.")
    ] = None,
    atol: Annotated[float | None, typer.Option(min=0, help="The same, absolute.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a different artifact of this name and version.")
    ] = False,
) -> None:
    """Export an attention module into a model repository, proven equal to eager PyTorch."""
    if list_presets:
        _print_presets()
        return
    try:
        if weights is None:
            _refuse(
                {
                    "--layout": layout,
                    "--prefix": prefix,
                    "--heads": heads,
                    "--causal": causal,
                    "--cross": cross,
                }
            )
            chosen = _preset(preset, seed)
        else:
            chosen = _checkpoint(
                weights,
                preset=preset,
                layout=layout,
                prefix=prefix,
                heads=_required(heads, "--heads", "the number of query heads"),
                causal=causal,
                cross=cross,
                rotary_theta=rotary_theta,
            )
        if describe:
            _print_description(chosen)
            return
        folder, manifest = write_artifact(
            chosen.module,
            Naming(_required(name or chosen.name, "--name", "of the model"), version, chosen.description),
            _required(out, "--out", "the model repository to write into"),
            precision=precision,
            tolerance=_tolerance(precision, rtol, atol),
            replace=replace,
        )
    except (ArtifactExistsError, ExportError, ParityError, OSError, ValueError) as error:
        _fail(str(error))
    _print_artifact(folder, manifest)


def _preset(name: str, seed: int) -> _Chosen:
    if not name:
        raise ValueError("name a preset (--list shows them), or bring --weights")
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} does not exist; --list shows those that do")
    return _Chosen(build_preset(name, seed=seed), name, PRESETS[name].description)


def _checkpoint(
    weights: Path,
    *,
    preset: str,
    layout: str,
    prefix: str,
    heads: int,
    causal: bool,
    cross: bool,
    rotary_theta: float,
) -> _Chosen:
    if preset:
        raise ValueError(f"preset {preset!r} and --weights: give one of them")
    checkpoint = load_checkpoint(
        weights,
        layout=_required(layout, "--layout", f"one of {', '.join(sorted(LAYOUTS))}"),
        prefix=prefix,
        heads=heads,
        causal=causal,
        cross=cross,
        rotary_theta=rotary_theta,
    )
    for name in checkpoint.left_out:
        console.print(f"left out, for it is no part of attention: {name}", markup=False)
    return _Chosen(checkpoint.module, "", f"{layout} checkpoint {weights.name}, {prefix or 'no prefix'}")


def _refuse(given: dict[str, object]) -> None:
    """Options of a checkpoint beside a preset, which has its own."""
    if beside := [option for option, value in given.items() if value]:
        raise ValueError(f"{', '.join(beside)} is for --weights; a preset has its own")


def _required(value: Value | None, option: str, meaning: str) -> Value:
    if not value:
        raise ValueError(f"{option} is missing: {meaning}")
    return value


def _tolerance(precision: Precision, rtol: float | None, atol: float | None) -> Tolerance:
    usual = TOLERANCES[precision]
    return Tolerance(rtol=usual.rtol if rtol is None else rtol, atol=usual.atol if atol is None else atol)


def _print_presets() -> None:
    table = Table("preset", "what it is", box=None, pad_edge=False)
    for preset in PRESETS.values():
        table.add_row(preset.name, preset.description)
    console.print(table)


def _print_description(chosen: _Chosen) -> None:
    config = chosen.module.config
    length = EXAMPLE_LENGTH
    linear = length * (config.flops_per_query + config.flops_per_key)
    products = length * length * config.flops_per_pair
    parameters = sum(parameter.numel() for parameter in chosen.module.parameters())
    for line in (
        f"{chosen.name}: {chosen.description}",
        f"  {config}",
        f"  {parameters:,} parameters",
        f"  floating-point operations: {config.flops_per_query:,} a query row, "
        f"{config.flops_per_key:,} a key row, {config.flops_per_pair:,} a pair of them",
        f"  for {length} rows: {linear:,} in the linear layers, {products:,} in the attention products",
    ):
        console.print(line, markup=False)


def _print_artifact(folder: Path, manifest: Manifest) -> None:
    tolerance = manifest.tolerance
    report = json.loads((folder / manifest.parity_report).read_bytes())
    cases = len(report["cases"])
    found = f"{report['max_abs_error']:.2g} in {cases} cases" if cases else "not measured: no CPU kernels"
    for line in (
        str(folder),
        f"  {manifest.parameters:,} parameters; opset {manifest.opset}; graphs {', '.join(manifest.graphs)}",
        f"  largest difference from eager PyTorch {found}; "
        f"tolerated {tolerance.atol:g} + {tolerance.rtol:g} x |value|",
    ):
        console.print(line)


def _fail(message: str) -> NoReturn:
    errors.print(f"error: {message}")
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
