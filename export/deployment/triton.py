"""Triton's configurations of a model: `config.pbtxt`, and `configs/lengths.pbtxt` for requests with lengths.

Triton looks for the first beside the versions of a model, and for the second if it is started with
`--model-config-name=lengths`. Each names one graph of the artifact.
"""

from typing import Any

from attention_serving.artifact.manifest import BATCH_AXIS, Graph, GraphKind, Manifest, TensorSpec
from attention_serving.export.deployment.protobuf_text import EnumName, dumps

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
    """The configurations of a model by file name, in protobuf's text format."""
    found = {CONFIGURATION: _plain(manifest)}
    if GraphKind.LENGTHS in manifest.graphs:
        found[LENGTHS_CONFIGURATION] = _lengths(manifest)
    return found


def _plain(manifest: Manifest) -> str:
    """Sequences of equal lengths, which Triton batches."""
    if manifest.runs_alone:
        return _text(manifest, GraphKind.PLAIN, 1, ALONE)
    return _text(manifest, GraphKind.PLAIN, MAX_BATCH_SIZE, BATCHED)


def _lengths(manifest: Manifest) -> str:
    """Padded sequences with `key_lengths`."""
    return _text(manifest, GraphKind.LENGTHS, 0, WHOLE_SHAPES)


def _text(manifest: Manifest, kind: GraphKind, max_batch_size: int, comment: str) -> str:
    graph = manifest.graphs[kind]
    message = {
        "name": manifest.name,
        "backend": BACKEND,
        "default_model_filename": graph.file,
        "max_batch_size": max_batch_size,
        **_tensors(graph, without_batch=max_batch_size > 0),
    }
    if max_batch_size > 1:
        message["dynamic_batching"] = {}
    message["instance_group"] = [{"count": 1, "kind": EnumName("KIND_AUTO")}]
    message["parameters"] = [{"key": "intra_op_thread_count", "value": {"string_value": ALL_CORES}}]
    return dumps(message, {"max_batch_size": comment, "instance_group": HINTS})


def _tensors(graph: Graph, *, without_batch: bool) -> dict[str, Any]:
    sides = {"input": graph.inputs, "output": graph.outputs}
    return {side: [_tensor(spec, without_batch) for spec in specs] for side, specs in sides.items()}


def _tensor(spec: TensorSpec, without_batch: bool) -> dict[str, Any]:  # noqa: FBT001 - called by one function
    axes = [axis for axis in spec.axes if not (without_batch and axis == BATCH_AXIS)]
    dims = [axis if isinstance(axis, int) else -1 for axis in axes]
    tensor = {"name": spec.name, "data_type": EnumName(DATA_TYPES[spec.data_type]), "dims": dims or [1]}
    return tensor if dims else tensor | {"reshape": {"shape": dims}}  # Triton refuses an empty shape
