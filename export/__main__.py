"""Command line: `python -m export --list`, `python -m export PRESET --out REPOSITORY`."""

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from export.artifact import ArtifactExistsError, Naming, write_artifact
from export.graph import ExportError
from export.manifest import Manifest, Tolerance
from export.parity import ParityError
from export.precision import TOLERANCES, Precision
from model.presets import PRESETS, build_preset

app = typer.Typer(add_completion=False, rich_markup_mode=None)
console = Console()
errors = Console(stderr=True)


@app.command()
def export(
    preset: Annotated[str, typer.Argument(help="Which preset to export; --list shows them.")] = "",
    *,
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets and stop.")] = False,
    out: Annotated[Path | None, typer.Option(help="Model repository to write into.")] = None,
    name: Annotated[str, typer.Option(help="Name of the model; the preset's where left out.")] = "",
    version: Annotated[int, typer.Option(min=1, help="Version of the model.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
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
    if preset not in PRESETS:
        _fail(f"preset {preset!r} does not exist; --list shows those that do" if preset else "name a preset")
    if out is None:
        _fail("--out is missing: the model repository to write into")
    try:
        naming = Naming(name or preset, version, PRESETS[preset].description)
        folder, manifest = write_artifact(
            build_preset(preset, seed=seed),
            naming,
            out,
            precision=precision,
            tolerance=_tolerance(precision, rtol, atol),
            replace=replace,
        )
    except (ArtifactExistsError, ExportError, ParityError, OSError, ValueError) as error:
        _fail(str(error))
    _print_artifact(folder, manifest)


def _tolerance(precision: Precision, rtol: float | None, atol: float | None) -> Tolerance:
    usual = TOLERANCES[precision]
    return Tolerance(rtol=usual.rtol if rtol is None else rtol, atol=usual.atol if atol is None else atol)


def _print_presets() -> None:
    table = Table("preset", "what it is", box=None, pad_edge=False)
    for preset in PRESETS.values():
        table.add_row(preset.name, preset.description)
    console.print(table)


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
        console.print(line, highlight=False, soft_wrap=True)


def _fail(message: str) -> NoReturn:
    errors.print(f"error: {message}", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
