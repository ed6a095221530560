"""TorchServe's handler of an attention model: runs requests of equal lengths together, on the CPU.

A request is one sequence for each input of the model, such as query (Tq, d) and key (Tk, d_key), in one of
three forms; the response has the form of the request.

JSON    {"query": [[...], ...], "key": [[...], ...]}, or the nested list alone if the model has one input
.npy    a field for each input, or the body alone if the model has one input
raw     little-endian float32 (int64 for ids) in row-major order, in the same places as .npy

A response is {"context_vectors": [[...], ...]}, or the first output as .npy or raw bytes. A request that is
refused does not affect the others of its batch: its response has status 400 and {"code", "message"} as JSON.
Over TorchServe's gRPC API, which does not transmit a handler's status, this JSON is the prediction.

Shapes: B sequences of a run; Tq and Tk their lengths.
"""

import io
import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime import InferenceSession, SessionOptions

MAX_ROWS = 4096
# Attention scores of the sequences that run together; a sequence that exceeds this alone runs alone.
MAX_SCORES = 16 << 20
POSITIONS = "positions"
BODY_FIELDS = ("body", "data")
NPY_MAGIC = b"\x93NUMPY"
BAD_REQUEST, FAILURE = 400, 500
JSON, NPY, RAW = "application/json", "application/x-npy", "application/octet-stream"
KINDS = {"float32": "fiu", "int64": "iu"}
Spec = Mapping[str, Any]
Arrays = dict[str, Any]
Sizes = dict[str, int]
log = logging.getLogger(__name__)


class AttentionHandler:
    """Runs the model of one archive. TorchServe calls `initialize` once, then `handle` for each batch."""

    def initialize(self, context: Any) -> None:
        """Loads the model and replays its golden vectors; raises RuntimeError if one misses its tolerance."""
        folder = Path(context.system_properties["model_dir"])
        settings = (context.model_yaml_config or {}).get("handler") or {}
        self._manifest = json.loads((folder / "manifest.json").read_text())
        file = context.manifest["model"]["serializedFile"]
        (graph,) = (graph for graph in self._manifest["graphs"].values() if graph["file"] == file)
        self._specs = graph["inputs"]
        self._names = ", ".join(spec["name"] for spec in self._specs)
        self._outputs = [spec["name"] for spec in graph["outputs"]]
        self._max_rows = int(settings.get("maxRows", MAX_ROWS))
        options = SessionOptions()
        options.intra_op_num_threads = int(settings.get("threads", 0)) or len(os.sched_getaffinity(0))
        # Together, these optimisers may crash: github.com/microsoft/onnxruntime/issues/28392.
        has_convolutions = b"Conv" in (folder / file).read_bytes()
        unsafe = "MatmulTransposeFusion" if has_convolutions else "NchwcTransformer"
        self._session = InferenceSession(
            str(folder / file), options, providers=["CPUExecutionProvider"], disabled_optimizers=[unsafe]
        )
        replay(self._session, folder / "golden.npz", self._manifest["tolerance"])

    def handle(self, data: Sequence[Mapping[str, Any]], context: Any) -> list[bytes]:
        """Answers each request of a batch with its own rows, or with the reason why it is refused."""
        replies, sequences, types = dict[int, bytes](), dict[int, Arrays](), dict[int, str]()
        for index, request in enumerate(data):
            try:
                sequences[index], types[index] = self._decode(request)
            except ValueError as error:
                replies[index] = refuse(context, index, BAD_REQUEST, str(error))
        for group in self._groups(sequences):
            try:
                results = self._run([sequences[index] for index in group])
            except Exception:  # one run must not fail the others
                log.exception("a run of %d sequences failed", len(group))
                reason = "the run failed; the log has details"
                replies |= {index: refuse(context, index, FAILURE, reason) for index in group}
                continue
            for index, result in zip(group, results, strict=True):
                replies[index] = reply(context, index, result, types[index])
        return [replies[index] for index in range(len(data))]

    def _decode(self, request: Mapping[str, Any]) -> tuple[Arrays, str]:
        """The inputs of one sequence by name, and the content type of its response."""
        fields = self._fields(request)
        arrays, types = {}, set()
        for spec in self._specs:
            name = spec["name"]
            if name in fields:
                arrays[name], content_type = to_array(fields.pop(name), spec)
                types.add(content_type)
            elif name != POSITIONS:
                raise ValueError(f"{name} is missing; this model takes {self._names}")
        if fields:
            raise ValueError(f"{', '.join(sorted(fields))} is unknown; this model takes {self._names}")
        sizes = self._sizes(arrays)
        for spec in self._specs:  # positions that are not given count from 0
            if spec["name"] not in arrays:
                arrays[spec["name"]] = np.arange(sizes[spec["axes"][1]], dtype=np.int64)
        return {spec["name"]: arrays[spec["name"]] for spec in self._specs}, min(types)

    def _fields(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a request by input name, whichever way they were sent."""
        if len(request) != 1 or not (body := next((name for name in BODY_FIELDS if name in request), "")):
            return dict(request)
        value = parse_body(request[body])
        if isinstance(value, Mapping):
            return dict(value)
        required = [spec["name"] for spec in self._specs if spec["name"] != POSITIONS]
        if len(required) > 1:
            raise ValueError(f"a body that is one array has one input; this model takes {self._names}")
        return {required[0]: value}

    def _sizes(self, arrays: Arrays) -> Sizes:
        """The size of each symbolic axis of one sequence; inputs that share an axis must agree."""
        sizes: Sizes = {}
        for spec in (spec for spec in self._specs if spec["name"] in arrays and is_sequence(spec)):
            axis, rows = spec["axes"][1], len(arrays[spec["name"]])
            most = min(self._max_rows, self._manifest.get("max_lengths", {}).get(axis, self._max_rows))
            if not 1 <= rows <= most:
                raise ValueError(f"{spec['name']} has {rows} rows; it must have 1 to {most}")
            if sizes.setdefault(axis, rows) != rows:
                raise ValueError(f"{spec['name']} has {rows} rows; an input before it has {sizes[axis]}")
        return sizes

    def _groups(self, sequences: Mapping[int, Arrays]) -> Iterator[list[int]]:
        """The sequences that run together: those of equal lengths, so that none is padded."""
        names = [spec["name"] for spec in self._specs if is_sequence(spec)]
        by_lengths: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, arrays in sequences.items():
            by_lengths[tuple(len(arrays[name]) for name in names)].append(index)
        # In int8 models of earlier exporters, all rows of a run share one scale: sequences affect each other.
        alone = self._manifest["precision"] == "int8" and not self._manifest.get("activation_scales")
        for lengths, indices in by_lengths.items():
            scores = max(self._manifest["num_heads"], 1) * math.prod((*lengths[:1], *lengths[-1:]))
            most = 1 if alone else max(1, MAX_SCORES // scores)
            yield from (indices[at : at + most] for at in range(0, len(indices), most))

    def _run(self, sequences: Sequence[Arrays]) -> list[Arrays]:
        """The outputs of each sequence by name."""
        feed = {name: np.stack([arrays[name] for arrays in sequences]) for name in sequences[0]}
        outputs = self._session.run(self._outputs, feed)  # (B, T, ...) or (B, ...) each
        return [dict(zip(self._outputs, rows, strict=True)) for rows in zip(*outputs, strict=True)]


def is_sequence(spec: Spec) -> bool:
    """Whether the rows of an input vary: those of a vector (B, d) do not, and a scalar (B,) has none."""
    return len(spec["axes"]) > 1 and isinstance(spec["axes"][1], str)


def replay(session: Any, golden: Path, tolerance: Mapping[str, Any]) -> None:
    """Runs the golden vectors; raises RuntimeError if one misses the tolerance, or if there are none."""
    limits = {name: tolerance[name] for name in ("rtol", "atol")}
    with np.load(golden, allow_pickle=False) as arrays:
        cases = sorted({name.split("/")[0] for name in arrays})
        if not cases:
            raise RuntimeError(f"{golden.name} contains no golden vectors")
        for case in cases:
            inputs = {node.name: arrays[f"{case}/inputs/{node.name}"] for node in session.get_inputs()}
            for output, value in zip(session.get_outputs(), session.run(None, inputs), strict=True):
                eager = arrays[f"{case}/outputs/{output.name}"]
                if value.shape != eager.shape or not np.allclose(value, eager, equal_nan=True, **limits):
                    raise RuntimeError(f"{output.name} of golden case {case} differs from its outputs")


def parse_body(value: Any) -> Any:
    """The content of a body: a JSON document, or the bytes themselves."""
    if isinstance(value, str | bytes | bytearray) and value[:1] in ("{", "[", b"{", b"["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def to_array(value: Any, spec: Spec) -> tuple[Any, str]:
    """The array of one input and the content type that it came in; raises ValueError if it does not fit."""
    name, shape, dtype = spec["name"], spec["axes"][1:], np.dtype(spec["data_type"])
    value = parse_body(value)
    if isinstance(value, bytes | bytearray):
        content_type = NPY if value.startswith(NPY_MAGIC) else RAW
        array = from_npy(name, value) if content_type == NPY else from_raw(name, value, shape, dtype)
    else:
        content_type, array = JSON, from_json(name, value)
    if array.dtype.kind not in KINDS[spec["data_type"]]:
        raise ValueError(f"{name} has elements of type {array.dtype}; they must be {dtype}")
    at = int(is_sequence(spec))
    if array.ndim != len(shape) or list(array.shape[at:]) != shape[at:]:
        expected = ", ".join(["T", *map(str, shape[1:])] if at else map(str, shape))
        raise ValueError(f"{name} has shape {list(array.shape)}; it must be one sequence, [{expected}]")
    bound = spec.get("exclusive_upper_bound")
    if bound is not None and not (np.all(array >= 0) and np.all(array < bound)):
        raise ValueError(f"{name} must contain ids from 0 to {np.subtract(bound, 1).tolist()}")
    with np.errstate(over="ignore"):
        array = np.asarray(array, dtype, order="C")  # scalars stay scalars
    if content_type == JSON and not np.isfinite(array).all():
        raise ValueError(f"{name} has values that are not finite; send them as .npy or raw bytes")
    return array, content_type


def from_json(name: str, value: Any) -> Any:
    """An array of a nested list of numbers."""
    try:
        if (array := np.array(value)).dtype.kind in "fiu":
            return array
    except ValueError:
        raise ValueError(f"{name} has rows of different lengths; give one sequence of equal rows") from None
    raise ValueError(f"{name} must be a nested list of numbers, .npy bytes or raw bytes")


def from_raw(name: str, value: bytes | bytearray, shape: Sequence[str | int], dtype: Any) -> Any:
    """An array of row-major little-endian bytes, of a shape whose first axis may vary."""
    width = [axis for axis in shape if isinstance(axis, int)]
    row_bytes = dtype.itemsize * math.prod(width)
    if len(value) % row_bytes:
        raise ValueError(
            f"{name} has {len(value)} bytes: neither JSON, nor .npy, nor rows of {row_bytes} bytes ({dtype})"
        )
    rows = np.frombuffer(value, dtype.newbyteorder("<")).reshape(-1, *width)
    return rows[0] if len(width) == len(shape) and len(rows) == 1 else rows


def from_npy(name: str, value: bytes | bytearray) -> Any:
    """An array of a .npy file."""
    try:
        return np.load(io.BytesIO(value), allow_pickle=False)
    except Exception as error:  # the parser of the header raises errors of many types
        raise ValueError(f"{name} is a damaged .npy file: {error}") from error


def reply(context: Any, index: int, result: Arrays, content_type: str) -> bytes:
    """The response of one request in its form: the outputs as JSON, or the first one as .npy or raw bytes."""
    if content_type == JSON and not all(np.isfinite(array).all() for array in result.values()):
        reason = "the result has values that are not finite; send the request as .npy or raw bytes"
        return refuse(context, index, BAD_REQUEST, reason)
    context.set_response_content_type(index, content_type)
    if content_type == JSON:
        return json.dumps({name: array.tolist() for name, array in result.items()}).encode()
    first, stream = np.ascontiguousarray(next(iter(result.values()))), io.BytesIO()
    if content_type == RAW:
        return first.tobytes()
    np.save(stream, first)
    return stream.getvalue()


def refuse(context: Any, index: int, code: int, message: str) -> bytes:
    """Sets the status of one request, and returns the response that says why."""
    context.set_response_status(code, HTTPStatus(code).phrase, index)
    context.set_response_content_type(index, JSON)
    return json.dumps({"code": code, "message": message}).encode()
