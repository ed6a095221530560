"""Converts tensors of the Open Inference Protocol to arrays."""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.inputs import check_once
from attention_serving.server.api.open_inference import parameters
from attention_serving.server.api.protobuf_bytes import Buffer, Parsed
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.api.tensors import DTYPES, FLOATS, Allowance, Shape, from_bytes
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.types import Array, Text

BYTES = "BYTES"
KNOWN_DATATYPES = (*DTYPES, *(name for name in FLOATS if name not in DTYPES), BYTES)
# The typed field for elements of each type. FP16 and BF16 have none: they are sent as raw contents.
CONTENTS = {
    **{name: f"{name.lower()}_contents" for name in ("BOOL", "INT64", "UINT64", "FP32", "FP64", BYTES)},
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
}
# The type of a typed field is the widest that it has elements of, which comes last.
CONTENT_TYPES = {CONTENTS[name]: dtype for name, dtype in DTYPES.items()}
TYPED_FIELDS = [field.name for field in pb.InferTensorContents.DESCRIPTOR.fields]
RAW_CONTENTS = "raw_input_contents"
# The fields that are cut out of requests.
PATHS = (RAW_CONTENTS, *[f"inputs.contents.{name}" for name in TYPED_FIELDS])
# NumPy's own limit.
MAX_AXES = 64
InputTensor = pb.ModelInferRequest.InferInputTensor


def decode_tensors(
    parsed: Parsed[pb.ModelInferRequest], allowance: Allowance, memory: SharedMemory
) -> dict[str, Array]:
    """Decodes the inputs of a request, by name. BYTES become arrays of `bytes` objects or views.

    Args:
        parsed: The request.
        allowance: What the request may take.
        memory: The regions of shared memory that inputs may be in.

    Raises:
        InvalidRequestError: An input contradicts itself, is repeated, or is not in a known form.
        LimitExceededError: An input is too large.
        OverloadedError: The memory for its numbers is not available.
        RegionNotFoundError: An input is in shared memory that is not registered.
        UnsupportedError: An input is in shared memory, which is switched off.
    """
    contents = parsed.contents(RAW_CONTENTS)
    raw, tensors, shared = iter(contents), dict[str, Array](), 0
    for index, sent in enumerate(parsed.message.inputs):
        name = sent.name
        check_once(name, tensors)
        tensor = _check_input(sent, allowance)
        where = parameters.place(name, parameters.read(sent.parameters), memory)
        if where is not None:
            allowance.take(name, where.size)
            tensors[name] = tensor.raw(where.read())
            shared += 1
            continue
        typed = [field for field in TYPED_FIELDS if ("inputs", index, "contents", field) in parsed.places]
        if not contents:
            tensors[name] = tensor.typed(typed, parsed, index)
        elif typed:
            raise InvalidRequestError(name, "has contents, but the request has raw_input_contents too")
        elif (data := next(raw, None)) is None:
            raise InvalidRequestError(RAW_CONTENTS, f"has no entry for input {name!r}")
        else:
            tensors[name] = tensor.raw(data)
    if next(raw, None) is not None:
        elsewhere = " outside shared memory" if shared else ""
        counts = f"has {len(contents)} entries; the request has {len(tensors) - shared} inputs{elsewhere}"
        raise InvalidRequestError(RAW_CONTENTS, counts)
    return tensors


def _check_input(sent: InputTensor, allowance: Allowance) -> "_Tensor":
    """An input of a known type, which has one element or more."""
    name, datatype, shape = sent.name, sent.datatype, tuple(sent.shape[: MAX_AXES + 1])
    if datatype not in KNOWN_DATATYPES:
        names = ", ".join(KNOWN_DATATYPES)
        raise InvalidRequestError(name, f"datatype {datatype!r} is unknown; must be one of {names}")
    if len(shape) > MAX_AXES:
        raise InvalidRequestError(name, f"has {len(sent.shape)} axes; the limit is {MAX_AXES}")
    # If a size was 0, the number of bytes would not bound the others.
    if min(shape, default=1) < 1:
        raise InvalidRequestError(name, f"has shape {list(shape)}; every size must be 1 or more")
    # The first axis counts sequences.
    allowance.limits.check_sequences(name, shape[0] if shape else 0)
    return _Tensor(name, datatype, shape, allowance)


class _Tensor(NamedTuple):
    """An input. Its size is checked against its shape before anything is built."""

    name: str
    datatype: str
    shape: Shape
    allowance: Allowance

    def raw(self, data: Buffer) -> Array:
        """Its elements from raw contents or shared memory."""
        if self.datatype == BYTES:
            return self._bytes(split_bytes(self.name, data))
        return from_bytes(self.name, data, self.datatype, self.shape, self.allowance)

    def typed(self, filled: Sequence[str], parsed: Parsed[Any], index: int) -> Array:
        """Its elements from its own contents, of which some fields are filled."""
        name, datatype = self.name, self.datatype
        field = CONTENTS.get(datatype)
        if field is None:
            raise InvalidRequestError(name, f"{datatype} must be sent in raw_input_contents")
        if filled and filled != [field]:
            message = f"is {datatype} and fills {', '.join(filled)}; must fill {field} only"
            raise InvalidRequestError(name, message)
        path = ("inputs", index, "contents", field)
        if datatype == BYTES:
            return self._bytes(parsed.contents(*path))
        dtype, wide = DTYPES[datatype], CONTENT_TYPES[field]
        numbers = parsed.numbers(wide, *path)
        self._check_count(count := len(numbers))
        # The type of the tensor may be narrower than that of the field, which copies the numbers once more.
        self.allowance.take(name, count * (wide.itemsize + (dtype.itemsize if dtype != wide else 0)))
        array = numbers.array()
        if dtype != wide:
            info: Any = np.iinfo(dtype)
            least, most = array.min(), array.max()
            if not info.min <= least <= most <= info.max:
                wrong = least if least < info.min else most
                message = f"contains {wrong}; {datatype} takes {info.min} to {info.max}"
                raise InvalidRequestError(name, message)
        return array.astype(dtype, copy=False).reshape(self.shape)

    def _bytes(self, elements: Iterable[Buffer]) -> Array:
        """The elements of a BYTES tensor, each of which is a sequence."""
        count = math.prod(self.shape)
        self.allowance.limits.check_sequences(self.name, count)
        values = list(islice(elements, count + 1))
        self._check_count(len(values))
        return np.fromiter(values, object, count).reshape(self.shape)

    def _check_count(self, count: int) -> None:
        if count != (expected := math.prod(self.shape)):
            number = f"more than {expected}" if self.datatype == BYTES and count > expected else count
            raise InvalidRequestError(self.name, f"has {number} elements; its shape is {list(self.shape)}")


def split_bytes(name: str, data: Buffer) -> Iterator[Buffer]:
    """Elements of a BYTES tensor: for each its length in 4 bytes, little-endian, and its data."""
    view, at = memoryview(data), 0
    while at < len(view):
        start = at + 4
        end = start + struct.unpack_from("<I", view, at)[0] if start <= len(view) else start
        if end > len(view):
            raise InvalidRequestError(name, f"the element at byte {at} extends beyond the end of the data")
        yield view[start:end]
        at = end


def decode_texts(name: str, tensor: NDArray[Any]) -> tuple[Text, ...]:
    """The texts of a BYTES tensor, in row-major order. They are decoded when they are tokenized.

    Raises:
        InvalidRequestError: It is not a BYTES tensor, or is empty.
    """
    if tensor.dtype != object or tensor.size == 0:
        raise InvalidRequestError(name, "must be a BYTES tensor with at least one element")
    return tuple(tensor.ravel())
