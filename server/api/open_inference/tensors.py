"""Converts tensors of the Open Inference Protocol to arrays."""

import math
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.inputs import check_once
from attention_serving.server.api.open_inference import parameters
from attention_serving.server.api.open_inference.parameters import RegionSlice
from attention_serving.server.api.protobuf_bytes import PackedNumbers, Parsed
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.api.tensors import DTYPES, UNCOUNTED, Allowance, from_bytes
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.types import Array, Text

BYTES = "BYTES"
KNOWN_DATATYPES = (*DTYPES, "FP16", "BF16", BYTES)
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
Raw: TypeAlias = "bytes | memoryview"
InputTensor = pb.ModelInferRequest.InferInputTensor


def decode_tensors(
    parsed: Parsed[pb.ModelInferRequest],
    allowance: Allowance = UNCOUNTED,
    memory: SharedMemory | None = None,
) -> dict[str, Array]:
    """Decodes the inputs of a request, by name. BYTES become arrays of `bytes` objects or views.

    Args:
        parsed: The request.
        allowance: What the request may take.
        memory: The regions of shared memory that inputs may be in; None if there are none.

    Raises:
        InvalidRequestError: An input contradicts itself, is repeated, or is not in a known form.
        LimitExceededError: An input is too large.
        OverloadedError: The memory for its numbers is not available.
        RegionNotFoundError: An input is in shared memory that is not registered.
        UnsupportedError: An input is in shared memory, which is switched off.
    """
    contents = parsed.contents(RAW_CONTENTS)
    raw = iter(contents)
    tensors: dict[str, Array] = {}
    shared = 0
    for index, tensor in enumerate(parsed.message.inputs):
        name = tensor.name
        check_once(name, tensors)
        decoder = _TensorDecoder(tensor, index, parsed, allowance)
        if (where := parameters.region_slice(name, tensor.parameters, memory)) is not None:
            tensors[name] = decoder.shared(where)
            shared += 1
        else:
            tensors[name] = decoder.raw(raw) if contents else decoder.typed()
    if next(raw, None) is not None:
        elsewhere = " outside shared memory" if shared else ""
        has = f"has {len(contents)} entries; the request has {len(tensors) - shared} inputs{elsewhere}"
        raise InvalidRequestError(RAW_CONTENTS, has)
    return tensors


class _TensorDecoder:
    """Decodes one input. Its size is checked against its shape before anything is built."""

    def __init__(
        self, tensor: InputTensor, index: int, parsed: Parsed[pb.ModelInferRequest], allowance: Allowance
    ) -> None:
        # Each access to a field of a message makes a new object.
        name, datatype, shape = tensor.name, tensor.datatype, tuple(tensor.shape[: MAX_AXES + 1])
        if datatype not in KNOWN_DATATYPES:
            known = ", ".join(KNOWN_DATATYPES)
            raise InvalidRequestError(name, f"datatype {datatype!r} is unknown; must be one of {known}")
        if len(shape) > MAX_AXES:
            raise InvalidRequestError(name, f"has {len(tensor.shape)} axes; the limit is {MAX_AXES}")
        # If a size was 0, the number of bytes would not bound the others.
        if min(shape, default=1) < 1:
            raise InvalidRequestError(name, f"has shape {list(shape)}; every size must be 1 or more")
        # The first axis counts sequences.
        allowance.limits.check_sequences(name, shape[0] if shape else 0)
        self._name, self._datatype, self._shape = name, datatype, shape
        self._allowance = allowance
        own = {field: parsed.contents("inputs", index, "contents", field) for field in TYPED_FIELDS}
        # An element of BYTES may be empty, an occurrence of numbers has none then.
        self._typed = {
            field: found for field, found in own.items() if found and (field == CONTENTS[BYTES] or any(found))
        }

    def shared(self, where: RegionSlice) -> Array:
        """The input's elements from shared memory."""
        self._allowance.take(self._name, where.size)
        return self._elements(memoryview(where.region.read(self._name, where.offset, where.size)))

    def raw(self, entries: Iterator[Raw]) -> Array:
        """The input's elements from the next entry of the raw contents."""
        if self._typed:
            raise InvalidRequestError(self._name, "has contents, but the request has raw_input_contents too")
        data = next(entries, None)
        if data is None:
            raise InvalidRequestError(RAW_CONTENTS, f"has no entry for input {self._name!r}")
        return self._elements(data)

    def _elements(self, data: Raw) -> Array:
        if self._datatype == BYTES:
            return self._bytes(_split_bytes(self._name, data))
        return from_bytes(self._name, data, self._datatype, self._shape, self._allowance)

    def typed(self) -> Array:
        """The input's elements from its own contents."""
        datatype = self._datatype
        field = CONTENTS.get(datatype)
        if field is None:
            raise InvalidRequestError(self._name, f"{datatype} must be sent in raw_input_contents")
        if list(self._typed) not in ([], [field]):
            raise InvalidRequestError(
                self._name, f"is {datatype} and fills {', '.join(self._typed)}; must fill {field} only"
            )
        found = self._typed.get(field, ())
        if datatype == BYTES:
            return self._bytes(found)
        dtype, wide = DTYPES[datatype], CONTENT_TYPES[field]
        numbers = PackedNumbers(found, wide)
        self._check_count(count := len(numbers))
        # Narrowing copies the numbers once more.
        self._allowance.take(self._name, count * (wide.itemsize + (dtype.itemsize if dtype != wide else 0)))
        return self._narrowed(numbers.array(), dtype).reshape(self._shape)

    def _bytes(self, elements: Iterable[Raw]) -> Array:
        """The elements of a BYTES tensor, each of which is a sequence."""
        count = math.prod(self._shape)
        self._allowance.limits.check_sequences(self._name, count)
        found = list(islice(elements, count + 1))
        self._check_count(len(found))
        return np.fromiter(found, object, count).reshape(self._shape)

    def _check_count(self, count: int) -> None:
        if count != (expected := math.prod(self._shape)):
            found = f"more than {expected}" if self._datatype == BYTES and count > expected else count
            raise InvalidRequestError(self._name, f"has {found} elements; its shape is {list(self._shape)}")

    def _narrowed(self, numbers: Array, dtype: np.dtype[Any]) -> Array:
        """The same numbers in the type of the tensor, which may be narrower than the type of the field."""
        if numbers.dtype == dtype:
            return numbers
        info = np.iinfo(dtype)
        if numbers.size and not info.min <= numbers.min() <= numbers.max() <= info.max:
            found = numbers.min() if numbers.min() < info.min else numbers.max()
            raise InvalidRequestError(
                self._name,
                f"contains {found}; {self._datatype} takes {info.min} to {info.max}",
            )
        return numbers.astype(dtype)


def _split_bytes(name: str, data: Raw) -> Iterator[Raw]:
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
