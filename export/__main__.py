"""Command line: `python -m export PRESET --out REPO`; or FILE:NAME, `--weights`, `--encoder` or `--onnx`.

Checks the usage without PyTorch, which takes seconds to import; `export.command` does the work. Exit status:
0 if the export succeeded, 1 if it failed, 2 if the command was used wrongly.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from attention_serving.artifact.keys import KeyFileError
from attention_serving.artifact.names import ModelId
from attention_serving.export import VERSION, options
from attention_serving.export.errors import ExportError
from attention_serving.export.options import Source
from attention_serving.export.precision import Precision
from attention_serving.export.verify import FAILURE, console, fail, make_app
from attention_serving.model.checkpoints.layouts import LAYOUTS
from attention_serving.model.config import POOLINGS
from attention_serving.model.presets import PRESETS

app = make_app()
# Names in errors that are not those of the parameters.
OPTIONS = {"preset": "a preset", "truncates": "--truncate"}


@app.command()
def export(
    preset: options.Preset = "",
    *,
    list_presets: options.ListPresets = False,
    describe: options.Describe = False,
    tool_version: options.ToolVersion = False,
    examples: options.Examples = None,
    masks: options.Masks = None,
    weights: options.Weights = None,
    encoder: options.Encoder = None,
    onnx: options.OnnxFile = None,
    golden: options.Golden = None,
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
    alias: options.Aliases = None,
    replace: options.Replace = False,
    sign_key: options.SignKey = None,
    targets: options.Targets = None,
    precision: options.ElementType = Precision.FP32,
    rtol: options.RelativeTolerance = None,
    atol: options.AbsoluteTolerance = None,
    cosine: options.SmallestCosine = None,
) -> None:
    """Export a module, a text encoder or an ONNX file into a model repository, and compare the results."""
    if tool_version:
        console.print(VERSION)
        return
    if list_presets:
        _print_presets()
        return
    checkpoint = _set_options(layout=layout, prefix=prefix, heads=heads, causal=causal, cross=cross)
    checkpoint |= _set_options(rotary_theta=rotary_theta)
    text = _set_options(pooling=pooling, dimensions=tuple(dimensions or ()), truncates=truncate)
    text |= _set_options(reference=reference, trust_remote_code=trust_remote_code)
    settings = _set_options(cosine=cosine, dry_run=describe, golden=golden)
    settings |= {"precision": precision} if precision is not Precision.FP32 else {}
    source = _source(
        preset, weights, encoder, onnx, seed, examples or (), masks or (), checkpoint, text, settings
    )
    if describe:
        with _report_failures():
            from attention_serving.export import command  # noqa: PLC0415 - imports PyTorch

            command.describe(source)
        return
    if not (name or source.preset):
        fail("--name is missing: give the name of the model")
    try:
        model = ModelId(name or preset, version, tuple(alias or ()))
    except ValueError as error:
        fail(str(error))
    if out is None:
        fail("--out is missing: give the model repository to write into")
    with _report_failures():
        from attention_serving.export import command  # noqa: PLC0415 - imports PyTorch

        command.run(
            source,
            model,
            out,
            precision,
            tolerances=_set_options(rtol=rtol, atol=atol, cosine=cosine),
            replace=replace,
            sign_key=sign_key,
            targets=targets or (),
        )


def _source(
    preset: str,
    weights: Path | None,
    encoder: Path | None,
    onnx: Path | None,
    seed: int | None,
    examples: Sequence[str],
    masks: Sequence[str],
    checkpoint: Mapping[str, Any],
    text: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Source:
    if onnx is not None:
        conflicts = _set_options(preset=preset, weights=weights, encoder=encoder, example=examples, seed=seed)
        return _onnx_file(onnx, masks, {**conflicts, **checkpoint, **text, **settings})
    if "golden" in settings:
        fail("--golden needs --onnx")
    if ":" in preset:
        conflicts = _set_options(weights=weights, encoder=encoder, cosine=settings.get("cosine"))
        return _module(preset, seed, examples, masks, {**conflicts, **checkpoint, **text})
    if examples or masks:
        flag = "--example" if examples else "--mask"
        fail(f"{flag} needs a module of your project, such as my_project.model:build_ranker")
    if encoder is not None:
        conflicts = _set_options(preset=preset, weights=weights, seed=seed) | dict(checkpoint)
        return _encoder(encoder, text, conflicts)
    if text:
        fail(f"{_flags(text)} needs --encoder")
    if weights is not None:
        return _checkpoint(weights, preset, seed, checkpoint)
    return _preset(preset, seed, checkpoint)


def _set_options(**values: Any) -> dict[str, Any]:
    """The options of the command line; 0 is a value."""
    return {name: value for name, value in values.items() if value or (value == 0 and value is not False)}


def _flags(options: Iterable[str]) -> str:
    return ", ".join(OPTIONS.get(name, f"--{name.replace('_', '-')}") for name in options)


def _preset(preset: str, seed: int | None, conflicts: Mapping[str, Any]) -> Source:
    if not preset:
        fail("name a preset (--list shows them), or give --weights or --encoder")
    if preset not in PRESETS:
        fail(f"preset {preset!r} does not exist; --list shows those that do")
    if conflicts:
        fail(f"{_flags(conflicts)} needs --weights; a preset has its own configuration")
    return Source(preset=preset, options={"seed": options.PRESET_SEED if seed is None else seed})


def _module(
    reference: str,
    seed: int | None,
    examples: Sequence[str],
    masks: Sequence[str],
    conflicts: Mapping[str, Any],
) -> Source:
    if conflicts:
        fail(f"{reference} and {_flags([*conflicts][:1])} exclude each other")
    if not examples:
        fail("--example is missing: give the name and shape of each input, such as --example src=2,3,32")
    seed = options.PRESET_SEED if seed is None else seed
    return Source(module=reference, options={"seed": seed, "examples": examples, "masks": masks})


def _onnx_file(path: Path, masks: Sequence[str], settings: Mapping[str, Any]) -> Source:
    if conflicts := [name for name in settings if name != "golden"]:
        fail(f"--onnx and {_flags(conflicts[:1])} exclude each other")
    return Source(onnx=path, options={"golden": settings.get("golden"), "masks": masks})


def _checkpoint(weights: Path, preset: str, seed: int | None, arguments: Mapping[str, Any]) -> Source:
    if preset:
        fail(f"preset {preset!r} and --weights exclude each other; give one of them")
    if seed is not None:
        fail("--seed needs a preset; with --weights, the checkpoint contains the weights")
    layouts = ", ".join(sorted(LAYOUTS))
    if (layout := arguments.get("layout")) is None:
        fail(f"--layout is missing: give one of {layouts}")
    if layout not in LAYOUTS:
        fail(f"layout {layout!r} does not exist; the layouts are: {layouts}")
    if "heads" not in arguments:
        fail("--heads is missing: give the number of query heads")
    if "rotary_theta" in arguments and not LAYOUTS[layout].rotary:
        fail(f"--rotary-theta: layout {layout!r} has no rotary embedding")
    return Source(weights=weights, options=arguments)


def _encoder(folder: Path, arguments: Mapping[str, Any], conflicts: Mapping[str, Any]) -> Source:
    if conflicts:
        fail(f"--encoder and {_flags([*conflicts][:1])} exclude each other; give one of them")
    pooling = arguments.get("pooling", "")
    if pooling and pooling not in POOLINGS:
        fail(f"--pooling {pooling!r} does not exist; give one of {', '.join(POOLINGS)}")
    return Source(encoder=folder, options=arguments)


@contextmanager
def _report_failures() -> Iterator[None]:
    """Ends the command with one line and its status if an expected failure occurs."""
    try:
        yield
    except (ExportError, KeyFileError, OSError, ValueError) as error:
        fail(str(error), FAILURE)


def _print_presets() -> None:
    table = Table("preset", "description", box=None, pad_edge=False)
    for name, preset in PRESETS.items():
        table.add_row(name, preset.description)
    console.print(table)


if __name__ == "__main__":
    app()
