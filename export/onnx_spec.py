"""The export of an ONNX file: its inputs, graphs, and the judge that its results are compared with.

The judge is golden vectors of the caller, or ONNX's reference evaluator on small shapes. What the judge does
not reach, such as other lengths, is compared with runs of the file itself in ONNX Runtime.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from attention_serving.artifact.golden import MAX_GOLDEN_BYTES, Arrays, GoldenCase
from attention_serving.artifact.manifest import GraphKind, all_sizes
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.adapted import PADDING, Mask, Meaning, is_mask_name
from attention_serving.export.errors import ExportError
from attention_serving.export.module import RESERVED, MaxLength, ModuleInputs, module_spec
from attention_serving.export.onnx_file import EVALUATOR, INTEGERS, REALS, RUNTIME, OnnxFile
from attention_serving.export.parity import golden_cases
from attention_serving.export.precision import Precision
from attention_serving.export.probe_masks import cut
from attention_serving.export.signature import ExportSpec, FileFacts, Signature, arrays_by_name

ADVICE = (
    ". Nothing else can judge ONNX Runtime: give golden vectors (--golden), inputs and outputs of the "
    "framework that made the file"
)


def read_vectors(path: Path, file: OnnxFile) -> list[Arrays]:
    """Cases of golden vectors as served, by name of the file's inputs and outputs.

    Args:
        path: A file of `numpy.savez`. Its arrays are named as the inputs and outputs of the file; with
            several cases, `name/0`, `name/1` and so on.
        file: The ONNX file.

    Raises:
        ExportError: The arrays are not those of the file.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # NumPy raises many types
        raise ExportError(f"{path} is not a file of numpy.savez: {error}") from error
    if (size := sum(array.nbytes for array in arrays.values())) > MAX_GOLDEN_BYTES:
        raise ExportError(f"{path} has {size} bytes of arrays; at most {MAX_GOLDEN_BYTES} are replayed")
    types, cases = {**file.inputs, **file.outputs}, defaultdict[str, Arrays](dict)
    for key, array in arrays.items():
        name, case = (key, "0") if key in types else key.rpartition("/")[::2]
        if name not in types or not np.can_cast(array.dtype, types[name].numpy(), "same_kind"):
            raise ExportError(
                f"{path}: array {key!r} of {array.dtype} is not an input or output of {file.path.name}: "
                f"{', '.join(f'{name} ({kind.name.lower()})' for name, kind in types.items())}"
            )
        served = np.float32 if types[name] in REALS else np.int64 if types[name] in INTEGERS else np.bool_
        cases[case][name] = array.astype(served)
    for case, vectors in cases.items():
        if missing := types.keys() - vectors.keys():
            raise ExportError(f"{path}: case {case} lacks {', '.join(sorted(missing))}")
        for name, axes in file.shapes.items():
            shape = vectors[name].shape
            pairs = zip(axes, shape, strict=False)
            if len(axes) != len(shape) or any(axis != size for axis, size in pairs if isinstance(axis, int)):
                raise ExportError(f"{path}: {name} is {list(shape)} in case {case}, and {axes} in the file")
    if not cases:
        raise ExportError(f"{path} has no arrays")
    return [*cases.values()]


def file_inputs(
    file: OnnxFile,
    module: nn.Module,
    vectors: Sequence[Arrays],
    dynamic_axes: Mapping[str, Mapping[int, str]] | None,
    max_length: MaxLength,
    masks: Mapping[str, str | None] | None,
    inputs: Mapping[str, str] | None,
) -> ModuleInputs:
    """The inputs of a file, with the axes that it names; axes without a name are found by runs.

    Args:
        file: The file.
        module: What runs it.
        vectors: Golden vectors, from which ranges of values are read.
        dynamic_axes: Names of axes in place of those of the file.
        max_length: The largest length, for all sequence axes or by axis.
        masks: What masks mean, in place of what their names say.
        inputs: By input of the file, its name in requests, in place of the usual one.

    Raises:
        ValueError: The inputs of the file cannot be served, or the arguments do not fit them.
    """
    axes = {**file.axes(), **(dynamic_axes or {})}
    names = {name: _valid_name(name) for name in file.inputs}
    is_mask = {name: len(axes.get(name, ())) > 1 and is_mask_name(name) for name in names}
    served = {
        name: f"{valid}_input" if valid in RESERVED and not is_mask[name] else valid
        for name, valid in names.items()
    }
    meanings = {name: Meaning.HIDES for name, mask in is_mask.items() if mask and name.endswith(PADDING)}
    examples = [{name: torch.from_numpy(case[name]) for name in file.inputs} for case in vectors[1:]]
    module_inputs = ModuleInputs.of(
        module,
        file.example(vectors[0] if vectors else None),
        axes,
        max_length,
        {**meanings, **(masks or {})},
        {name: renamed for name, renamed in served.items() if renamed != name} | dict(inputs or {}),
        examples,
    )
    for mask in module_inputs.masks:
        if len(mask.sequence_axes) > 1:
            raise ExportError(
                f"{file.path}: {mask.name} {mask.axes} is a mask of query and key rows, and files can only "
                f"have masks of keys (B, T): export the module that it was made of"
            )
    if module_inputs.understanding.batch_second or any(module_inputs.understanding.output_axes):
        raise ExportError(
            f"{file.path}: the batch is not the first axis of every input and output; make it so"
        )
    return module_inputs


def file_spec(
    file: OnnxFile,
    module: nn.Module,
    inputs: ModuleInputs,
    vectors: Sequence[Arrays],
    golden: Path | None,
    description: str,
    tolerance: Tolerance | None,
) -> ExportSpec:
    """The export of a file: its graphs, checked by runs in ONNX Runtime, and what its judge computes.

    Args:
        file: The file.
        module: What runs it in ONNX Runtime.
        inputs: Its inputs.
        vectors: Golden vectors; empty for the reference evaluator.
        golden: Where the vectors come from.
        description: One line.
        tolerance: Largest accepted difference from the judge. Default: that of the file's precision.

    Raises:
        ExportError: Sequences of a batch depend on each other, a mask does not hide, or nothing can judge.
    """
    precision, alone = file.precision, file.shares_scales
    names = [_valid_name(name) for name in file.outputs]
    if len({*names}) < len(names):
        raise ExportError(
            f"{file.path}: outputs {', '.join(file.outputs)} are {', '.join(names)} in responses"
        )
    spec = module_spec(module, inputs, names, description, tolerance, precision=precision, runs_alone=alone)
    if vectors and golden is not None:
        judge = f"golden vectors of {golden.name}"
        pairs = [*zip(names, file.outputs, strict=True)]
        renamed = [case | {name: case[output] for name, output in pairs} for case in vectors]
        cases = _cases_of_vectors(renamed, inputs, spec.signatures, golden)
    else:
        judge = EVALUATOR
        try:
            evaluated = inputs.adapted(file.evaluator())
            cases = {s.kind: golden_cases(evaluated, s) for s in spec.signatures}
        except ExportError as error:
            raise error.with_advice(ADVICE) from error
    graphs = {s.kind: file.graph(s, inputs.masks, inputs.parameters) for s in spec.signatures}
    note = (
        f"{judge}: what the {sum(map(len, cases.values()))} golden cases are compared with. All others are "
        f"compared with {file.path.name} in {RUNTIME}, which nothing else has judged"
    )
    return replace(
        spec,
        compares_special_values=False,
        notes=[*spec.notes, note],
        file=FileFacts(
            graphs=graphs,
            golden=cases,
            judge=judge,
            parameters=file.parameters,
            activation_scales="fixed" if precision is Precision.INT8 and not alone else None,
        ),
    )


def _valid_name(name: str) -> str:
    """A name as requests, responses and golden vectors can have it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip("_.-")


def _cases_of_vectors(
    vectors: Sequence[Arrays], inputs: ModuleInputs, signatures: Sequence[Signature], golden: Path
) -> dict[GraphKind, list[GoldenCase]]:
    """Golden vectors as cases of each graph. If a mask hides rows, the plain graph takes the others alone."""
    cases: Mapping[GraphKind, list[GoldenCase]] = {signature.kind: [] for signature in signatures}
    plain = signatures[0]
    for arrays in vectors:
        batch = {spec.name: arrays[inputs.parameters.get(spec.name, spec.name)] for spec in plain.inputs}
        lengths = {mask.sequence_axes[0]: _lengths(mask, arrays[mask.name], golden) for mask in inputs.masks}
        results = [torch.from_numpy(arrays[spec.name]) for spec in plain.outputs]
        outputs = arrays_by_name(plain, batch, results)
        if GraphKind.LENGTHS in cases:
            of_inputs = {name: lengths[axis] for axis, name in inputs.lengths.items()}
            cases[GraphKind.LENGTHS].append(GoldenCase(GraphKind.LENGTHS, batch | of_inputs, outputs))
        full = {axis: arrays[mask.name].shape[-1] for mask in inputs.masks for axis in mask.sequence_axes}
        if all((lengths[axis] == full[axis]).all() for axis in lengths):
            cases[GraphKind.PLAIN].append(GoldenCase(GraphKind.PLAIN, batch, outputs))
            continue
        for index in range(len(next(iter(batch.values())))):
            sizes = {axis: int(rows[index]) for axis, rows in lengths.items()}
            sequence = cut(batch, plain.inputs, index, sizes)
            result = cut(outputs, plain.outputs, index, all_sizes(sizes, plain.derived_axes))
            cases[GraphKind.PLAIN].append(GoldenCase(GraphKind.PLAIN, sequence, result))
    return dict(cases)


def _lengths(mask: Mask, values: np.ndarray[Any, Any], golden: Path) -> np.ndarray[Any, Any]:
    """The number of rows that a mask shows, (B,), which are the first ones of each sequence."""
    rows = values.reshape(len(values), -1, values.shape[-1])[:, 0]  # (B, T)
    attends = rows != 0 if mask.meaning is Meaning.ATTENDS else rows == 0
    lengths: np.ndarray[Any, Any] = attends.sum(axis=1)
    if not np.array_equal(attends, np.arange(rows.shape[1]) < lengths[:, None]) or not lengths.all():
        raise ExportError(
            f"{golden}: {mask.name} hides rows before others, or all of a sequence. Callers send lengths "
            f"in its place: give vectors whose hidden rows are the last ones"
        )
    return lengths
