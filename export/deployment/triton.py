"""Triton's configurations of a model: `config.pbtxt`, and `configs/lengths.pbtxt` for requests with lengths.

Triton looks for the first beside the versions of a model, and for the second if it is started with
`--model-config-name=lengths`. Each names one graph of the artifact.

They are written in protobuf's text format without the message's own Python classes: two copies of Triton's
schema in one process, this project's and tritonclient's, exclude each other. The tests parse what is written
with tritonclient's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attention_serving.artifact.manifest import BATCH_AXIS, GraphKind, Manifest, TensorSpec

BACKEND = "onnxruntime"
DATA_TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64", "bool": "TYPE_BOOL"}
CONFIGURATION = "config.pbtxt"
LENGTHS_CONFIGURATION = "configs/lengths.pbtxt"
# Sequences in one request or batch. More of them no longer raise the rate on CPU.
MAX_BATCH_SIZE = 32
ALL_CORES = "0"

BATCHED = """\
The shapes below lack the batch axis, which every tensor of a request has. Triton joins requests of equal
shapes only, along that axis, where sequences do not affect each other."""
ALONE = """\
The shapes below lack the batch axis, which every tensor of a request has. It is 1: sequences of one run
affect each other in this precision, so that each runs alone."""
WHOLE_SHAPES = """\
0: the shapes below are those of whole requests, and requests are not joined. The key lengths have the batch
axis only, as in the requests of other servers of this model."""
HINTS = """\
Hints for CPUs. This has the lowest latency with one request in flight. As many instances as cores with one
thread each (intra_op_thread_count "1") have the highest rate under load."""


def configurations(manifest: Manifest) -> dict[str, str]:
    """The configurations of a model by file name, in protobuf's text format.

    The first is for sequences of equal lengths, which Triton batches; the second for padded sequences with
    `key_lengths`.
    """
    largest, comment = (1, ALONE) if manifest.runs_alone else (MAX_BATCH_SIZE, BATCHED)
    found = {CONFIGURATION: _text(manifest, GraphKind.PLAIN, largest, comment)}
    if GraphKind.LENGTHS in manifest.graphs:
        found[LENGTHS_CONFIGURATION] = _text(manifest, GraphKind.LENGTHS, 0, WHOLE_SHAPES)
    return found


def _text(manifest: Manifest, kind: GraphKind, max_batch_size: int, comment: str) -> str:
    graph, without_batch = manifest.graphs[kind], max_batch_size > 0
    message = {
        "name": manifest.name,
        "backend": BACKEND,
        "default_model_filename": graph.file,
        "max_batch_size": max_batch_size,
        "input": [_tensor(spec, without_batch=without_batch) for spec in graph.inputs],
        "output": [_tensor(spec, without_batch=without_batch) for spec in graph.outputs],
    }
    if max_batch_size > 1:
        message["dynamic_batching"] = {}
    message["instance_group"] = [{"count": 1, "kind": EnumName("KIND_AUTO")}]
    message["parameters"] = [{"key": "intra_op_thread_count", "value": {"string_value": ALL_CORES}}]
    return dumps(message, {"max_batch_size": comment, "instance_group": HINTS})


def _tensor(spec: TensorSpec, *, without_batch: bool) -> dict[str, Any]:
    axes = [axis for axis in spec.axes if not (without_batch and axis == BATCH_AXIS)]
    dims = [axis if isinstance(axis, int) else -1 for axis in axes]
    tensor = {"name": spec.name, "data_type": EnumName(DATA_TYPES[spec.data_type]), "dims": dims or [1]}
    return tensor if dims else tensor | {"reshape": {"shape": dims}}  # Triton refuses an empty shape


class EnumName(str):
    """A value of an enumeration, which is written without quotes."""

    __slots__ = ()


def dumps(message: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    r"""Writes one message.

    Args:
        message: Values by field name: str, int, bool, EnumName, a mapping for a message, or a sequence of
            these for a repeated field. Sequences of numbers are written on one line.
        comments: By name of an outermost field, the text above it; may have several lines.

    Raises:
        TypeError: A value has another type.

    >>> print(dumps({"name": "a\"b", "input": [{"dims": [-1, 4]}]}), end="")
    name: "a\"b"
    input {
      dims: [ -1, 4 ]
    }
    """
    return "".join(f"{line}\n" for line in _lines(message, comments or {}))


def _lines(message: Mapping[str, Any], comments: Mapping[str, str]) -> Iterator[str]:
    for name, value in message.items():
        if name in comments:
            yield from (f"# {line}" for line in comments[name].splitlines())
        for element in _elements(value):
            if isinstance(element, Mapping):
                yield f"{name} {{"
                yield from (f"  {line}" for line in _lines(element, {}))
                yield "}"
            else:
                yield f"{name}: {_scalar(element)}"


def _elements(value: Any) -> Sequence[Any]:
    """The elements that are written one by one."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value]
    return value if any(isinstance(element, Mapping) for element in value) else [value]


def _scalar(value: Any) -> str:
    if isinstance(value, EnumName):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return f'"{_escaped(value)}"'
    if isinstance(value, Sequence):
        return f"[ {', '.join(map(_scalar, value))} ]"
    raise TypeError(f"{value!r} cannot be written as a protobuf value")


def _escaped(text: str) -> str:
    """UTF-8 bytes; those that are not printable ASCII, and quotes and backslashes, in octal."""
    return "".join(
        chr(byte) if 0x20 <= byte < 0x7F and byte not in b'"\\' else f"\\{byte:03o}"  # noqa: PLR2004 - ASCII
        for byte in text.encode()
    )
