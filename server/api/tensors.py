"""Tensors on the wire, in both protocols, as arrays and back, without copying if NumPy allows it.

FP16 and BF16 halve the bytes of the vectors that models take and return as FP32.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from attention_serving.artifact.encoder import QUANTISED, quantise
from attention_serving.artifact.manifest import ATTENTION_MASK, GraphKind
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Array, Mask, MaskKind, Ragged, Result

Shape = tuple[int, ...]
# The types of elements that are arrays as they are, by the name that both protocols have for them.
DTYPE_BY_NAME = {
    "BOOL": np.dtype("?"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
NAME_BY_DTYPE = {dtype: name for name, dtype in DTYPE_BY_NAME.items()}
FLOAT32 = DTYPE_BY_NAME["FP32"]
# How real numbers are sent: the types of their bits. NumPy lacks bfloat16, the upper half of a float32.
FLOAT_DTYPE_BY_NAME = {"FP32": FLOAT32, "FP16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
# The types of elements on the wire.
WIRE_DTYPE_BY_NAME = {**DTYPE_BY_NAME, **FLOAT_DTYPE_BY_NAME}
HALF_BITS = 16
QUIET_NAN = np.uint32(0x400000)


class Allowance(NamedTuple):
    """The limits of a request, and the reservation that its decoded copies are added to.

    Attributes:
        limits: The server's limits.
        reservation: Memory of the request.
    """

    limits: Limits
    reservation: Reservation

    def check_bytes(self, field: str, size: int) -> None:
        """Checks the decoded size of an input.

        Raises:
            LimitExceededError: It is too large.
        """
        if size > (limit := self.limits.max_input_bytes):
            raise LimitExceededError(field, f"would have {size} bytes decoded; the limit is {limit}")

    def take(self, field: str, size: int) -> None:
        """Checks the size of a copy that is about to be made, and reserves its memory.

        Raises:
            LimitExceededError: It is too large.
            OverloadedError: The memory is not available.
        """
        self.check_bytes(field, size)
        self.reservation.add(size)


def from_bytes(
    field: str, data: bytes | memoryview, datatype: str, shape: Shape, allowance: Allowance
) -> Array:
    """The little-endian elements of a tensor: a read-only view, or float32 numbers of FP16 and BF16.

    Args:
        field: Name of the field, for errors.
        data: The bytes.
        datatype: Type of the elements: one of `WIRE_DTYPE_BY_NAME`.
        shape: Shape of the array. No size is negative.
        allowance: What a copy may take.

    Raises:
        InvalidRequestError: The number of bytes does not fit the shape, or a boolean is neither 0 nor 1.
        LimitExceededError: The copy would be too large.
        OverloadedError: The memory of the copy is not available.
    """
    dtype = WIRE_DTYPE_BY_NAME[datatype]
    if len(data) != (expected := dtype.itemsize * math.prod(shape)):
        sizes, name = " x ".join(map(str, shape)), "bfloat16" if datatype == "BF16" else dtype.name
        message = f"has {len(data)} bytes; {sizes} elements of {name} need {expected} bytes"
        raise InvalidRequestError(field, message)
    elements = np.frombuffer(data, dtype).reshape(shape)
    # The runtime computes with other bytes than 0 and 1 as if they were numbers.
    if dtype.kind == "b" and (most := elements.view(np.uint8).max(initial=0)) > 1:
        raise InvalidRequestError(field, f"contains the byte {most}; a boolean must be 0 or 1")
    if datatype in DTYPE_BY_NAME:
        return elements
    allowance.take(field, elements.size * FLOAT32.itemsize)
    if datatype == "FP16":
        return elements.astype(FLOAT32)
    bits = elements.astype("<u4")
    bits <<= HALF_BITS
    return bits.view(FLOAT32)


def datatype_of(array: Array, float_datatype: str) -> str:
    """The type in which the elements of an array are sent."""
    return float_datatype if array.dtype == FLOAT32 else NAME_BY_DTYPE[array.dtype]


class OutputPlaceholder(NamedTuple):
    """The place of an output in a reply: the elements of its arrays, one after the other.

    Attributes:
        name: Its name.
        float_datatype: The type in which real numbers are sent: one of `FLOAT_DTYPE_BY_NAME`; of embeddings
            also one of `QUANTISED`.
        shape: The shape to which each array is padded with zeros; None for their own.
        largest: The largest value of quantised embeddings: see `quantise`.
    """

    name: str
    float_datatype: str = "FP32"
    shape: Shape | None = None
    largest: float = 1.0

    def size(self, arrays: Sequence[Array]) -> int:
        """Size of its elements, in bytes."""
        if self.float_datatype == "BITS":
            return sum([math.prod(array.shape[:-1]) * -(-array.shape[-1] // 8) for array in arrays])
        dtype = WIRE_DTYPE_BY_NAME[self.float_datatype] if arrays[0].dtype == FLOAT32 else arrays[0].dtype
        sizes = [array.size if self.shape is None else math.prod(self.shape) for array in arrays]
        return int(sum(sizes) * dtype.itemsize)

    def parts(self, arrays: Sequence[Array]) -> list[Array]:
        """Its arrays as they are sent. Those in row-major order and of that type are not copied.

        Raises:
            InvalidRequestError: An embedding that is to be quantised contains NaN or infinity.
        """
        if self.shape is not None:
            arrays = [
                np.pad(array, [(0, end - size) for size, end in zip(array.shape, self.shape, strict=True)])
                for array in arrays
            ]
        if self.float_datatype in QUANTISED:
            for index, array in enumerate(arrays):
                if not np.isfinite(array).all():
                    problem = f"is {self.float_datatype}, but embedding {index} contains NaN or infinity"
                    raise InvalidRequestError("output_data_type", problem)
            arrays = [quantise(array, self.float_datatype, self.largest) for array in arrays]
        elif self.float_datatype != "FP32":
            arrays = [cast_floats(array, self.float_datatype) for array in arrays]
        # Those of a run with padding may be views with gaps.
        return list(map(np.ascontiguousarray, arrays))


TemplatePart: TypeAlias = bytes | OutputPlaceholder


class ReplyTemplate:
    """The bytes of replies to requests of one plan, with places for their outputs.

    Attributes:
        is_cacheable: Whether the reply depends only on the bytes outside the tensors, so that the request may
            be cached.
        steps: What is computed of a result before it is encoded, for the codec threads; None for nothing.
    """

    __slots__ = ("_encode", "_parts", "is_cacheable", "steps")

    def __init__(
        self,
        encode: Callable[[Result], Sequence[TemplatePart]],
        *,
        is_cacheable: bool = True,
        steps: Callable[[Result], Iterator[Callable[[], object]]] | None = None,
    ) -> None:
        """Creates a template; `encode` makes it of the first result."""
        self._encode, self.is_cacheable, self.steps = encode, is_cacheable, steps
        self._parts: Sequence[TemplatePart] | None = None

    def parts(self, result: Result) -> list[Any]:
        """The parts of the reply to one request, without its id: bytes, and arrays."""
        if self._parts is None:
            self._parts = self._encode(result)
        parts: list[Any] = []
        for part in self._parts:
            if isinstance(part, bytes):
                parts.append(part)
            else:
                parts += part.parts(result.outputs[part.name])
        return parts


def cast_floats(array: Array, float_datatype: str) -> Array:
    """An array in another type of real numbers, rounded to the nearest number; ties go to the even one.

    What is too large for FP16 becomes infinite. Arrays of other types than float32 stay as they are.
    """
    if float_datatype == "FP32" or array.dtype != FLOAT32:
        return array
    if float_datatype == "FP16":
        with np.errstate(over="ignore"):
            return array.astype(FLOAT_DTYPE_BY_NAME[float_datatype])
    bits = np.ascontiguousarray(array).view("<u4")
    # Adds a half of what the last remaining bit stands for, or just less than that if the bit is even.
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> HALF_BITS) & np.uint32(1)))
    # The sum of a NaN could overflow to a number.
    nan = np.isnan(array)
    if nan.any():
        rounded[nan] = bits[nan] | QUIET_NAN
    upper: Array = (rounded >> HALF_BITS).astype(FLOAT_DTYPE_BY_NAME[float_datatype])
    return upper


def check_once(name: str, inputs: Mapping[str, object]) -> None:
    """Checks that an input is not among those before.

    Raises:
        InvalidRequestError: It is.
    """
    if name in inputs:
        raise InvalidRequestError(name, "is sent twice; each input must be sent once")


def build_mask(
    shapes: Sequence[Shape],
    flags: Array,
    model: LoadedModel,
    inputs: Mapping[str, Ragged],
    *,
    has_batch: bool,
) -> Mask | None:
    """The mask of each sequence: (Tk,), (Tq, Tk), (1, Tq, Tk) or (H, Tq, Tk).

    Args:
        shapes: The shape of each; or one, with the batch axis, if the inputs have it.
        flags: The elements of all of them.
        model: The model, which takes a mask.
        inputs: The other inputs. The mask is None if they lack one of the model's, which is refused later.
        has_batch: Whether the inputs have the batch axis.

    Raises:
        InvalidRequestError: The masks are not those of the sequences.
    """
    lengths = {spec.length_axis: inputs[spec.name].lengths for spec in model.inputs if spec.name in inputs}
    *_, query_axis, key_axis = model.manifest.graphs[GraphKind.MASK].inputs[-1].axes
    if query_axis not in lengths or key_axis not in lengths:
        return None
    queries, keys = lengths[query_axis], lengths[key_axis]
    batch: Shape = ()
    if has_batch and len(shapes) == 1:
        queries, keys, batch = queries[:1], keys[:1], (len(queries),)
    if len(shapes) != len(queries):
        message = f"contains {len(shapes)} masks for {len(queries)} sequences"
        raise InvalidRequestError(ATTENTION_MASK, message)
    kinds = set[MaskKind]()
    for shape, query, key in zip(shapes, queries, keys, strict=False):
        expected = {
            (*batch, key): MaskKind.KEYS,
            (*batch, query, key): MaskKind.PAIRS,
            (*batch, 1, query, key): MaskKind.PAIRS,
        }
        if heads := model.manifest.num_heads:
            expected[*batch, heads, query, key] = MaskKind.HEADS
        if shape not in expected or flags.dtype != np.bool_:
            *first, last = map(str, expected)
            message = f"is {flags.dtype.name} {shape}; must be bool {', '.join(first)} or {last}"
            raise InvalidRequestError(ATTENTION_MASK, message)
        kinds.add(expected[shape])
    if len(kinds) > 1:
        message = "has masks of different numbers of axes; all must have the same"
        raise InvalidRequestError(ATTENTION_MASK, message)
    return Mask(kinds.pop(), flags.ravel())
