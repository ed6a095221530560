"""Command line: `python -m export PRESET --out REPO`; or FILE:NAME, `--weights`, `--encoder` or `--onnx`.

Checks the usage without PyTorch, which takes seconds to import; `export.command` does the work. Exit status:
0 if the export succeeded, 1 if it failed, 2 if the command was used wrongly.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from attention_serving.artifact.keys import KeyFileError
from attention_serving.artifact.names import ModelId
from attention_serving.export import VERSION
from attention_serving.export.deployment.write import DeploymentTarget
from attention_serving.export.errors import ExportError
from attention_serving.export.options import (
    CHECKPOINT,
    ENCODER,
    HELP_VALUES,
    PRECISION,
    RESULT,
    SOURCE,
    Reference,
    Source,
    option,
)
from attention_serving.export.precision import Precision
from attention_serving.export.verify import FAILURE, console, fail, make_app, read_help
from attention_serving.model.checkpoints.layouts import LAYOUTS
from attention_serving.model.config import POOLINGS
from attention_serving.model.presets import PRESETS

app = make_app()
# Names in errors that are not those of the parameters.
FLAGS = {"preset": "a preset", "truncates": "--truncate", "examples": "--example", "masks": "--mask"}
OF_CHECKPOINTS = ("layout", "prefix", "heads", "causal", "cross", "rotary_theta")
OF_ENCODERS = ("pooling", "dimensions", "truncates", "reference", "trust_remote_code")
# By kind of source, the options that it takes, and those of other kinds that exclude it.
ALLOWED = {
    "onnx": ("golden", "masks"),
    "module": ("seed", "examples", "masks"),
    "encoder": OF_ENCODERS,
    "weights": OF_CHECKPOINTS,
    "preset": ("seed",),
}
SOURCES = ("preset", "weights", "encoder", "onnx")
EXCLUDED = dict.fromkeys(ALLOWED, SOURCES) | {
    "onnx": (*SOURCES, "precision", "cosine", "dry_run"),
    "module": (*SOURCES, "cosine"),
}
A_MODULE = "a module of your project, such as my_project.model:build_ranker"
NEEDS = {
    **dict.fromkeys(OF_CHECKPOINTS, "--weights; a preset has its own configuration"),
    **dict.fromkeys(OF_ENCODERS, "--encoder"),
    "golden": "--onnx",
    "examples": A_MODULE,
    "masks": f"{A_MODULE}, or --onnx",
    "seed": "a preset, or a module of your project; files contain the weights",
}


def export(
    preset: Annotated[str, typer.Argument(show_default=False)] = "",
    *,
    list_presets: Annotated[bool, option(None, "--list")] = False,
    describe: Annotated[bool, option(None, "--describe", "--dry-run")] = False,
    tool_version: Annotated[bool, option(None, "--tool-version", "-V")] = False,
    examples: Annotated[list[str] | None, option(SOURCE, "--example")] = None,
    masks: Annotated[list[str] | None, option(SOURCE, "--mask")] = None,
    weights: Annotated[Path | None, option(SOURCE)] = None,
    encoder: Annotated[Path | None, option(SOURCE)] = None,
    onnx: Annotated[Path | None, option(SOURCE)] = None,
    golden: Annotated[Path | None, option(SOURCE)] = None,
    seed: Annotated[int | None, option(SOURCE)] = None,
    layout: Annotated[str, option(CHECKPOINT)] = "",
    prefix: Annotated[str, option(CHECKPOINT)] = "",
    heads: Annotated[int | None, option(CHECKPOINT, min=1)] = None,
    causal: Annotated[bool, option(CHECKPOINT, "--causal")] = False,
    cross: Annotated[bool, option(CHECKPOINT, "--cross")] = False,
    rotary_theta: Annotated[float | None, option(CHECKPOINT, min=0)] = None,
    pooling: Annotated[str, option(ENCODER)] = "",
    dimensions: Annotated[list[int] | None, option(ENCODER, min=1)] = None,
    truncate: Annotated[bool, option(ENCODER, "--truncate")] = False,
    reference: Annotated[Reference | None, option(ENCODER, show_choices=True)] = None,
    trust_remote_code: Annotated[bool, option(ENCODER, "--trust-remote-code")] = False,
    out: Annotated[Path | None, option(RESULT)] = None,
    name: Annotated[str, option(RESULT)] = "",
    version: Annotated[int, option(RESULT, min=1, show_default=True)] = 1,
    alias: Annotated[list[str] | None, option(RESULT)] = None,
    replace: Annotated[bool, option(RESULT, "--replace")] = False,
    sign_key: Annotated[Path | None, option(RESULT)] = None,
    targets: Annotated[list[DeploymentTarget] | None, option(RESULT, "--target", show_choices=True)] = None,
    precision: Annotated[Precision, option(PRECISION, show_default=True)] = Precision.FP32,
    rtol: Annotated[float | None, option(PRECISION, min=0)] = None,
    atol: Annotated[float | None, option(PRECISION, min=0)] = None,
    cosine: Annotated[float | None, option(PRECISION, min=0, max=0.999999)] = None,
) -> None:
    """Export a module, a text encoder or an ONNX file into a model repository, and compare the results.

    Options:
        preset: Name of the preset to export (--list shows all), or a module of your project, such as
            my_project.model:build_ranker: a torch.nn.Module, or a function or class that returns one.
        list_presets: List the presets and exit.
        describe: Describe the module and exit. Of a module of your project, show what would be exported, or
            what prevents it. Nothing is written.
        tool_version: Show the version of this program and exit. --version is the model's.
        examples: With a module of your project: an input of forward by its name, shape and type, such as
            src=2,3,32, ids=2,3:int64<1000 (random ids below 1,000) or src_key_padding_mask=2,3:bool (a mask
            that hides nothing). Can be repeated.
        masks: With a module of your project or --onnx: what a mask means, such as 'query_mask=True attends',
            'padding=True hides', 'bias=added' (-inf hides), 'n=lengths of sequence' (numbers of rows) or
            'attention_mask=None' (an ordinary input). Can be repeated.
        weights: Checkpoint (.safetensors, .pt, .pth or .bin) to export instead of a preset.
        encoder: Folder of a text encoder, text classifier or reranker to export instead of a preset, as saved
            by transformers or sentence-transformers, which is needed. Nothing is downloaded.
        onnx: ONNX file to export instead of a preset, with external data in its folder. Axis 0 of its inputs
            and outputs is the batch.
        golden: With --onnx: file of numpy.savez with inputs and the outputs that the file's framework
            computes for them, by their names in the file. Default: the results are compared with ONNX's
            reference evaluator.
        seed: Seed of random weights and random examples. Default: {seed}.
        layout: Layout of the checkpoint, required: {layouts}.
        prefix: Prefix of the tensor names in the checkpoint, such as encoder.layer.0.attention.
        heads: Number of query heads, at least 1; required.
        causal: Rows do not attend to later rows.
        cross: Keys come from a second sequence.
        rotary_theta: Base frequency of the rotary embedding, for layout {rotary_layouts}; 0 for none.
            Default: {theta:g}.
        pooling: How an embedding is made of the token vectors, for folders that do not state it: {poolings}.
            Default: the model's own for text towers, the last token for causal models, otherwise the mean.
        dimensions: Number of leading elements that requests may shorten embeddings to, beside those that the
            folder states. Can be repeated.
        truncate: Cut texts with more tokens than the model takes, unless a request says otherwise. Without
            it, they are refused unless a request asks for it.
        reference: Library whose results for 64 texts the export must have: sentence-transformers,
            transformers or none. Default: the one that wrote the folder.
        trust_remote_code: Run Python code that the folder brings along.
        out: Folder of the model repository; created if it does not exist.
        name: Name of the model. Default: the name of the preset.
        version: Version of the model.
        alias: Further name under which requests reach the model, such as BAAI/bge-small-en-v1.5. Can be
            repeated.
        replace: Replace a different artifact of this name and version, and a different Triton configuration
            of this name. Without it, such an export is refused; an identical one succeeds and changes
            nothing.
        sign_key: PEM file with an Ed25519 private key. Signs a certificate of what was proven on this
            machine.
        targets: Also write what another server needs: triton, config.pbtxt beside the versions; torchserve, a
            model archive (needs torch-model-archiver); onnx, one ONNX file with its weights and a program
            that runs it. Can be repeated.
        precision: Element type of the arithmetic.
        rtol: Largest accepted relative difference from eager PyTorch. Default for fp32: {fp32.rtol:g}; of
            text encoders {encoders[fp32].rtol:g}.
        atol: Largest accepted absolute difference, added to the relative one. Default for fp32:
            {fp32.atol:g}; of text encoders {encoders[fp32].atol:g}.
        cosine: Smallest accepted cosine between an embedding of a text encoder and eager PyTorch's, in place
            of the differences. Default for int8: {encoders[int8].cosine:g}.
    """
    if tool_version:
        console.print(VERSION)
        return
    if list_presets:
        _print_presets()
        return
    arguments = _set_options(preset=preset, weights=weights, encoder=encoder, onnx=onnx, golden=golden)
    arguments |= _set_options(seed=seed, examples=examples, masks=masks, layout=layout, prefix=prefix)
    arguments |= _set_options(heads=heads, causal=causal, cross=cross, rotary_theta=rotary_theta)
    arguments |= _set_options(pooling=pooling, truncates=truncate, reference=reference, cosine=cosine)
    arguments |= _set_options(dimensions=tuple(dimensions or ()), trust_remote_code=trust_remote_code)
    arguments |= _set_options(dry_run=describe)
    arguments |= {"precision": precision} if precision is not Precision.FP32 else {}
    source = _source(arguments)
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


def _source(arguments: Mapping[str, Any]) -> Source:
    """What is exported, by the options of the command line."""
    preset = arguments.get("preset", "")
    kind = next((kind for kind in ("encoder", "weights") if kind in arguments), "preset")
    kind = "onnx" if "onnx" in arguments else "module" if ":" in preset else kind
    key, title = ("preset", preset) if kind == "module" else (kind, _flag(kind))
    for name in arguments:
        if name in NEEDS and name not in ALLOWED[kind]:
            fail(f"{_flag(name)} needs {NEEDS[name]}")
        if name in EXCLUDED[kind] and name != key:
            fail(f"{title} and {_flag(name)} exclude each other; give one of them")
    options = {name: value for name, value in arguments.items() if name in ALLOWED[kind]}
    if kind == "preset" and preset not in PRESETS:
        missing = "name a preset (--list shows them), or give --weights or --encoder"
        fail(f"preset {preset!r} does not exist; --list shows those that do" if preset else missing)
    if kind == "module" and "examples" not in options:
        fail("--example is missing: give the name and shape of each input, such as --example src=2,3,32")
    if kind == "weights":
        _check_checkpoint(options)
    if (pooling := options.get("pooling")) is not None and pooling not in POOLINGS:
        fail(f"--pooling {pooling!r} does not exist; give one of {', '.join(POOLINGS)}")
    return Source(**{kind: arguments[key]}, options=options)


def _set_options(**values: Any) -> dict[str, Any]:
    """The options of the command line; 0 is a value."""
    return {name: value for name, value in values.items() if value or (value == 0 and value is not False)}


def _flag(option: str) -> str:
    return FLAGS.get(option, f"--{option.replace('_', '-')}")


def _check_checkpoint(options: Mapping[str, Any]) -> None:
    layouts = ", ".join(sorted(LAYOUTS))
    if (layout := options.get("layout")) is None:
        fail(f"--layout is missing: give one of {layouts}")
    if layout not in LAYOUTS:
        fail(f"layout {layout!r} does not exist; the layouts are: {layouts}")
    if "heads" not in options:
        fail("--heads is missing: give the number of query heads")
    if "rotary_theta" in options and not LAYOUTS[layout].rotary:
        fail(f"--rotary-theta: layout {layout!r} has no rotary embedding")


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


app.command()(read_help(export, **HELP_VALUES))

if __name__ == "__main__":
    app()
