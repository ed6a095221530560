"""Triton's configurations of a model: `config.pbtxt`, and `configs/lengths.pbtxt` for requests with lengths.

Triton looks for the first beside the versions of a model, and for the second if it is started with
`--model-config-name=lengths`. Each names one graph of the artifact.

They are written in protobuf's text format without the message's own Python classes: two copies of Triton's
schema in one process, this project's and tritonclient's, exclude each other. The tests parse what is written
with tritonclient's.
"""

import json
from collections.abc import Iterator

from attention_serving.artifact.manifest import BATCH_AXIS, GraphKind, Manifest, TensorSpec

DATA_TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64", "bool": "TYPE_BOOL"}
CONFIGURATION = "config.pbtxt"
LENGTHS_CONFIGURATION = "configs/lengths.pbtxt"
# Sequences in one request or batch. More of them no longer raise the rate on CPU.
MAX_BATCH_SIZE = 32

BATCHED = """\
# The shapes below lack the batch axis, which every tensor of a request has. Triton joins requests of equal
# shapes only, along that axis, where sequences do not affect each other."""
ALONE = """\
# The shapes below lack the batch axis, which every tensor of a request has. It is 1: sequences of one run
# affect each other in this precision, so that each runs alone."""
WHOLE_SHAPES = """\
# 0: the shapes below are those of whole requests, and requests are not joined. The key lengths have the batch
# axis only, as in the requests of other servers of this model."""
HALF_PRECISION = """\
# All optimisations together may crash on graphs in half precision, and Triton cannot disable one of them:
# github.com/microsoft/onnxruntime/issues/28392. Level 1 is safe.
optimization {
  graph {
    level: 1
  }
}"""
DYNAMIC_BATCHING = """\
dynamic_batching {
}"""
INSTANCES = """\
# Hints for CPUs. This has the lowest latency with one request in flight. As many instances as cores with one
# thread each (intra_op_thread_count "1") have the highest rate under load.
instance_group {
  count: 1
  kind: KIND_AUTO
}
parameters {
  key: "intra_op_thread_count"
  value {
    string_value: "0"
  }
}"""


def configurations(manifest: Manifest) -> dict[str, str]:
    """The configurations of a model by file name, in protobuf's text format.

    The first is for sequences of equal lengths, which Triton batches; the second for padded sequences with
    `key_lengths`.
    """
    largest, comment = (1, ALONE) if manifest.runs_alone else (MAX_BATCH_SIZE, BATCHED)
    texts = {CONFIGURATION: _text(manifest, GraphKind.PLAIN, largest, comment)}
    if GraphKind.LENGTHS in manifest.graphs:
        texts[LENGTHS_CONFIGURATION] = _text(manifest, GraphKind.LENGTHS, 0, WHOLE_SHAPES)
    return texts


def _text(manifest: Manifest, kind: GraphKind, max_batch_size: int, comment: str) -> str:
    graph = manifest.graphs[kind]
    lines = [
        f"name: {_quote(manifest.name)}",
        'backend: "onnxruntime"',
        f"default_model_filename: {_quote(graph.file)}",
        comment,
        f"max_batch_size: {max_batch_size}",
    ]
    for side, specs in (("input", graph.inputs), ("output", graph.outputs)):
        for spec in specs:
            lines += _tensor(side, spec, without_batch=max_batch_size > 0)
    if manifest.precision in {"fp16", "bf16"}:
        lines.append(HALF_PRECISION)
    if max_batch_size > 1:
        lines.append(DYNAMIC_BATCHING)
    return "\n".join([*lines, INSTANCES, ""])


def _tensor(side: str, spec: TensorSpec, *, without_batch: bool) -> Iterator[str]:
    axes = [axis for axis in spec.axes if not (without_batch and axis == BATCH_AXIS)]
    dims = ", ".join(str(axis) if isinstance(axis, int) else "-1" for axis in axes)
    yield f"{side} {{"
    yield f"  name: {_quote(spec.name)}"
    yield f"  data_type: {DATA_TYPES[spec.data_type]}"
    yield f"  dims: [ {dims or 1} ]"
    if not dims:  # Triton refuses an empty shape
        yield "  reshape {"
        yield "    shape: [  ]"
        yield "  }"
    yield "}"


def _quote(text: str) -> str:
    """A string of protobuf's text format, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)
