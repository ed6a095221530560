"""`export_module` and `export_onnx`, the Python interface of the exporter."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attention_serving.artifact.keys import read_private_key
from attention_serving.artifact.manifest import Manifest, file_hash
from attention_serving.artifact.names import ModelId
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.errors import details_in_file
from attention_serving.export.precision import TOLERANCES, Precision

if TYPE_CHECKING:
    from torch import Tensor, nn

BF16_NOTE = (
    "bf16: ONNX Runtime has kernels for CUDA only. This export cannot compare the graph with eager PyTorch, "
    "and servers without CUDA refuse it; precision='fp16' runs everywhere"
)


@details_in_file()
def export_module(  # noqa: PLR0913 - a public interface of keywords
    module: "nn.Module",
    example_inputs: "Mapping[str, Tensor] | Sequence[Tensor]",
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    *,
    out: Path | str,
    name: str,
    version: int = 1,
    aliases: Sequence[str] = (),
    description: str = "",
    output_names: Sequence[str] | None = None,
    max_length: int | Mapping[str, int] | None = None,
    masks: Mapping[str, str | None] | None = None,
    inputs: Mapping[str, str] | None = None,
    examples: "Sequence[Mapping[str, Tensor] | Sequence[Tensor]]" = (),
    branches: Literal["as traced"] | None = None,
    precision: Precision | str = Precision.FP32,
    tolerance: Tolerance | None = None,
    replace: bool = False,
    sign_key: Path | None = None,
    progress: Callable[[str], object] | None = None,
) -> tuple[Path, Manifest]:
    """Exports any module of sequences or fixed-size inputs, such as a whole transformer encoder.

    The server serves the artifact over both protocols. The typed API carries the first input as the query and
    the first output as the context vectors; the Open Inference Protocol carries all by name.

    Masks are not inputs of the model. A mask of keys (B, T) becomes lengths: callers send sequences of
    different lengths, or padded tensors with `key_lengths`, the rows of the last input, and `query_lengths`,
    those of the first. The server runs them together if padding changes no result. A mask of query and key
    rows (B, Tq, Tk) becomes the mask of requests: bool, True = may attend. Inputs are masks by their name
    (`…key_padding_mask`, `…attention_mask`) or because `masks` says so.

    No input can have these names, which have a meaning of their own in requests: attention_mask,
    key_lengths, query_lengths, positions, block_rows, text, text_pair, lengths. `inputs` renames an input.

    Exporting the same module again changes nothing and succeeds.

    Args:
        module: A copy of it is exported, in evaluation mode and float32, without the wrappers of
            torch.compile, DataParallel, PEFT or torch.jit; the module itself is not changed. Takes tensors;
            returns a tensor, or a sequence, mapping or dataclass of them, also nested; None and caches are
            left out. The axes of outputs are those of inputs, fixed, or follow from the length of one
            sequence, as T + 1 does. The sequences of a batch must not depend on each other.
        example_inputs: By parameter name of `forward`, or in its order. Real numbers, int64 or bool. Integer
            inputs are ids: served and tested from 0 to the last row of the embedding that reads them, or to
            the largest value of the example. Real numbers are tested in the range of the example, or as
            standard normal ones if it is constant or like them.
        dynamic_axes: By input name, the symbolic name of each dynamic axis. Axis 0 is "batch", axis 1 the
            sequence, or the other way round; all others are fixed, and axis 1 is if it has no name. Of masks,
            the last axis is that of the keys, and the one before it may be that of the query rows. At most
            four different sequence axes. Default, and for inputs without an entry: found by runs with other
            sizes. `progress` is called with what was understood, in a form that can be passed here.
        out: Model repository; made if it does not exist.
        name: Name of the model.
        version: Version of the model, from 1.
        aliases: Further names under which requests reach the model; they may contain slashes.
        description: One line. Default: the name of the class.
        output_names: Names of the outputs. Default: their keys or fields, joined by dots if they are nested;
            `context_vectors` for a single one without a name, or if all axes are given; otherwise `output_0`
            and so on.
        max_length: Largest number of rows of a sequence, for all sequence axes or by axis name, from 2. The
            server refuses longer requests. Default: the largest that the module was tried with, which is
            `max_position_embeddings`, `n_positions`, `max_seq_len` or `max_sequence_length` of
            `module.config` if there is one, otherwise 8,192; or less if the module takes no more, if its code
            branches on a greater length, or if a run needs more than 20 seconds or the free memory. The
            smallest number of rows is found as well.
        masks: By input, what the elements of a mask say: "True hides", "True attends", or "added" for real
            numbers that are added to the scores (-inf hides); None for an input that is not a mask. Default:
            as PyTorch and Hugging Face name them: `…key_padding_mask` hides, `…attention_mask` attends, and
            real numbers are added, except 1 and 0 of an `attention_mask` (B, T).
        inputs: By parameter of `forward`, the name of the input in requests if it is another, such as
            {"text": "captions"}.
        examples: Further inputs, in the form of `example_inputs`, which widen the tested range of values.
        branches: "as traced" accepts branches on values of inputs, such as `if x.max() > 10`, of which the
            graph follows the side that the example takes; manifest, parity report and certificate repeat
            it. Default: they are refused.
        precision: Element type of the arithmetic: fp32, fp16, bf16 or int8.
        tolerance: Largest accepted difference from eager PyTorch. Default: that of the precision, whose
            absolute part is multiplied as outputs grow with the length, or by their magnitude if that is
            above 1 and the values of the example are not standard normal.
        replace: Whether to replace a different artifact of the same name and version.
        sign_key: PEM file with an Ed25519 private key, which signs a certificate of what was proven on this
            machine. Default: the artifact has no certificate.
        progress: Called with a description of each step, and at the end if the artifact is unchanged.
            Default: shown on standard error if it is a terminal.

    Returns:
        The artifact's folder and its manifest.

    Raises:
        ValueError: Inputs, axes, lengths or names do not fit each other or the module.
        ArtifactExistsError: The repository holds another artifact of that name and version, and `replace` is
            false. It is refused before the export begins, unless only the code of the module has changed.
        ExportError: The module is random, mixes sequences, or branches on lengths or values, or the graph
            cannot be made. The message says what to change, and names a file with details.
        ParityError: The graph differs from eager PyTorch by more than its tolerance.
        KeyFileError: `sign_key` is not the file of such a key.
    """
    # PyTorch takes seconds to import; see export/__init__.py.
    from attention_serving.export.artifact import ArtifactWriter, show, source_digest  # noqa: PLC0415
    from attention_serving.export.module import AS_TRACED, module_spec, read_inputs  # noqa: PLC0415
    from attention_serving.export.target import Target  # noqa: PLC0415

    key = read_private_key(sign_key) if sign_key is not None else None
    target = Target(repository=Path(out), model=ModelId(name, version, tuple(aliases)), replace=replace)
    precision, progress = Precision(precision), progress or show
    if branches not in (None, AS_TRACED):
        raise ValueError(f"branches={branches!r}: must be None or {AS_TRACED!r}")
    if precision is Precision.BF16:
        progress(BF16_NOTE)
    source, module_inputs, notes = read_inputs(
        module, example_inputs, dynamic_axes, max_length, masks, inputs, examples
    )
    names = output_names or module_inputs.output_names(dynamic_axes or {})
    for note in notes if dynamic_axes is not None else [module_inputs.describe(names), *notes]:
        progress(note)
    description = description or getattr(module, "original_name", type(source).__name__)
    identity: dict[str, object] = {
        "inputs": module_inputs,
        "outputs": list(names),
        "description": description,
    }
    accepted = tolerance or TOLERANCES[precision]
    digest = source_digest(
        source, identity | {"precision": precision, "tolerance": accepted, "branches": branches}
    )
    target.check(digest)
    progress("runs in eager PyTorch")
    with module_inputs.advise_masks():
        spec = module_spec(source, module_inputs, names, description, tolerance, branches)
        accepted = tolerance or spec.tolerances[precision]
        for line in spec.signatures[0].describe():
            progress(line)
        return ArtifactWriter(spec, target, precision, accepted, digest, progress).publish(key)


@details_in_file()
def export_onnx(  # noqa: PLR0913 - a public interface of keywords
    file: Path | str,
    *,
    out: Path | str,
    name: str,
    golden: Path | str | None = None,
    version: int = 1,
    aliases: Sequence[str] = (),
    description: str = "",
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    max_length: int | Mapping[str, int] | None = None,
    masks: Mapping[str, str | None] | None = None,
    inputs: Mapping[str, str] | None = None,
    tolerance: Tolerance | None = None,
    replace: bool = False,
    sign_key: Path | None = None,
    progress: Callable[[str], object] | None = None,
) -> tuple[Path, Manifest]:
    """Exports an ONNX file that exists already, of any framework.

    PyTorch is not asked: the judge of the results is the golden vectors, or ONNX's reference evaluator on
    small shapes. Manifest, parity report and certificate name it. Other lengths and batch sizes are compared
    with runs of the file itself, and sequences in a batch with the same ones alone.

    Args:
        file: The file, with external data in its folder. Axis 0 of each input and output is the batch, and
            must vary; axis 1 may. Real numbers are served as float32, integers as int64.
        out: Model repository; made if it does not exist.
        name: Name of the model.
        golden: File of `numpy.savez` with inputs and the outputs that the file's framework computes for them,
            named as in the file; of several cases, `name/0`, `name/1` and so on. Needed if the evaluator
            lacks an operator, or if no embedding shows the range of ids.
        version: Version of the model, from 1.
        aliases: Further names under which requests reach the model; they may contain slashes.
        description: One line. Default: the name of the file.
        dynamic_axes: As in `export_module`, in place of the names that the file has for axes of an input.
        max_length: As in `export_module`.
        masks: As in `export_module`; `…padding_mask` hides, and `attention_mask` attends.
        inputs: By input of the file, its name in requests. Default: the name in the file, with "_" for what
            names cannot contain, and "_input" after a name that has a meaning of its own in requests.
        tolerance: Largest accepted difference from the judge. Default: that of the file's precision.
        replace: Whether to replace a different artifact of the same name and version.
        sign_key: PEM file with an Ed25519 private key, which signs a certificate.
        progress: Called with a description of each step, as in `export_module`.

    Returns:
        The artifact's folder and its manifest.

    Raises:
        ValueError: The arguments do not fit each other or the file.
        ArtifactExistsError: The repository holds another artifact of that name and version.
        ExportError: The file cannot be read, run or judged, or mixes the sequences of a batch.
        ParityError: Results differ from the judge's by more than the tolerance.
        KeyFileError: `sign_key` is not the file of such a key.
    """
    from attention_serving.export.artifact import ArtifactWriter, show, source_digest  # noqa: PLC0415
    from attention_serving.export.onnx_file import OnnxFile  # noqa: PLC0415
    from attention_serving.export.onnx_spec import file_inputs, file_spec, read_vectors  # noqa: PLC0415
    from attention_serving.export.target import Target  # noqa: PLC0415

    key = read_private_key(sign_key) if sign_key is not None else None
    target = Target(repository=Path(out), model=ModelId(name, version, tuple(aliases)), replace=replace)
    progress, path = progress or show, Path(golden) if golden is not None else None
    source = OnnxFile.read(Path(file))
    vectors = read_vectors(path, source) if path is not None else []
    description = description or source.path.name
    module = source.session()
    options = {
        "file": source.digest,
        "golden": file_hash(path) if path is not None else "",
        "arguments": [dynamic_axes, max_length, masks, inputs, description, tolerance],
    }
    digest = source_digest(module, options)
    target.check(digest)
    module_inputs = file_inputs(source, module, vectors, dynamic_axes, max_length, masks, inputs)
    progress(module_inputs.describe([*source.outputs]))
    for renamed, parameter in module_inputs.parameters.items():
        progress(f"  input {parameter}: {renamed} in requests")
    progress("runs in ONNX Runtime and of the judge")
    with module_inputs.advise_masks():
        spec = file_spec(source, module, module_inputs, vectors, path, description, tolerance)
        accepted = tolerance or spec.tolerances[source.precision]
        return ArtifactWriter(spec, target, source.precision, accepted, digest, progress).publish(key)


@details_in_file()
def check_module(
    module: "nn.Module",
    example_inputs: "Mapping[str, Tensor] | Sequence[Tensor]",
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    *,
    output_names: Sequence[str] | None = None,
    max_length: int | Mapping[str, int] | None = None,
    masks: Mapping[str, str | None] | None = None,
    inputs: Mapping[str, str] | None = None,
    examples: "Sequence[Mapping[str, Tensor] | Sequence[Tensor]]" = (),
    branches: Literal["as traced"] | None = None,
    progress: Callable[[str], object] = print,
) -> None:
    """Shows what `export_module` would export, in seconds and without writing anything.

    What is understood of the inputs is shown first, then inputs and outputs of the graph. Only short
    sequences are tried: a whole export proves more.

    Args:
        module: As in `export_module`, with the arguments below.
        example_inputs: The inputs.
        dynamic_axes: Names of the axes that vary.
        output_names: Names of the outputs.
        max_length: Largest number of rows.
        masks: What masks mean.
        inputs: Names of inputs in requests.
        examples: Further inputs.
        branches: Whether branches on values are accepted.
        progress: Called with each text.

    Raises:
        ValueError: The first obstacle, as `export_module` raises it.
    """
    from attention_serving.export.graph import trace  # noqa: PLC0415
    from attention_serving.export.module import module_spec, read_inputs  # noqa: PLC0415

    source, module_inputs, notes = read_inputs(
        module, example_inputs, dynamic_axes, max_length, masks, inputs, examples
    )
    names = output_names or module_inputs.output_names(dynamic_axes or {})
    for note in (module_inputs.describe(names), *notes):
        progress(note)
    with module_inputs.advise_masks():
        spec = module_spec(source, module_inputs.shortened(), names, "", None, branches)
    plain = spec.signatures[0]
    for direction, tensors in (("input", plain.inputs), ("output", plain.outputs)):
        for tensor in tensors:
            axes = ", ".join(map(str, tensor.axes))
            bound = tensor.exclusive_upper_bound
            ids = f", ids below {bound}" if bound is not None else ""
            progress(f"{direction} {tensor.name}: {tensor.data_type} ({axes}){ids}")
    # The largest lengths were not tried.
    for line in dataclasses.replace(plain, max_lengths=module_inputs.max_lengths).describe():
        progress(line)
    progress(f"graphs: {', '.join(signature.kind for signature in spec.signatures)}")
    trace(spec.module, plain)
