"""Stored contexts: a body of inference, whose inputs are the rows, as a message of attention.v1."""

from functools import partial
from typing import Any

import numpy as np

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.inference import open_inference_pb2
from attention_serving.server.api.open_inference.requests import values_of
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.http.exchange import Exchange, Reply, run
from attention_serving.server.http.infer import receive
from attention_serving.server.http.schemas import ContextRequest, check, to_json
from attention_serving.server.http.text_models import SERVICE

PUT, APPEND = f"/{SERVICE}/PutContext", f"/{SERVICE}/AppendContext"
MASK = "mask"
INPUTS = ("key", "value", MASK)
KEYS = pb.AttentionMask.KIND_KEYS
# The body as a message with arrays, and the message that is sent.
COPIES = 2


async def put(exchange: Exchange) -> Reply:
    """Answers POST .../contexts: puts a context, or appends rows to one."""
    message, _ = await receive(exchange, PUT)
    exchange.memory.add(COPIES * len(message))
    method, request = await run(len(message), partial(encode, message))
    reply_type = pb.PutContextResponse if method == PUT else pb.AppendContextResponse
    reply = await exchange.call(method, request, timeout=None)
    return Reply.of_json(to_json(reply_type.FromString(reply).context))


def encode(message: bytes) -> tuple[str, bytes]:
    """Encodes the request to put a context, or to append to one.

    Args:
        message: The body as a serialized ModelInferRequest.

    Returns:
        The method of the gRPC server, and its serialized request.

    Raises:
        InvalidRequestError: A parameter or an input is wrong.
    """
    body = open_inference_pb2.ModelInferRequest.FromString(message)
    parameters = check({"parameters": values_of(body.parameters), "inputs": []}, ContextRequest).parameters
    request: Any = pb.PutContextRequest(shared=parameters.shared)
    if parameters.append_to:
        request = pb.AppendContextRequest(id=parameters.append_to)
    request.model_name, request.model_version = body.model_name, body.model_version
    request.ttl_seconds = parameters.ttl_seconds
    if len(body.inputs) != len(body.raw_input_contents):
        raise InvalidRequestError("inputs", "must not be in shared memory")
    rows = {}
    for tensor, data in zip(body.inputs, body.raw_input_contents, strict=True):
        name = tensor.name
        if name not in INPUTS or name in rows:
            raise InvalidRequestError(name, "is unknown or given twice; inputs are key, value and mask")
        fill = _fill_mask if name == MASK else _fill_vectors
        try:
            rows[name] = fill(getattr(request, name), tensor, data)
        except ValueError:
            kind = f"is {tensor.datatype} of the shape {list(tensor.shape)}"
            must = "BOOL (rows)" if name == MASK else "FP32, FP16 or BF16 (rows, width) or (1, rows, width)"
            raise InvalidRequestError(name, f"{kind}; must be {must}") from None
    if len(set(rows.values())) > 1:
        raise InvalidRequestError("inputs", f"have different numbers of rows: {rows}")
    return APPEND if parameters.append_to else PUT, request.SerializeToString()


def _fill_vectors(message: pb.VectorSequences, tensor: Any, data: bytes) -> int:
    """Sets one sequence; returns its number of rows. ValueError if the type or the shape is another."""
    *batch, rows, width = tensor.shape
    if batch not in ([], [1]):
        raise ValueError
    message.data_type = pb.DataType.Value(f"DATA_TYPE_{tensor.datatype}")
    message.lengths.append(rows)
    message.width, message.data = width, data
    return message.lengths[0]


def _fill_mask(message: pb.AttentionMask, tensor: Any, data: bytes) -> int:
    """Packs a mask; returns its number of elements. ValueError if the type or the shape is another."""
    if tensor.datatype != "BOOL" or list(tensor.shape) != [len(data)]:
        raise ValueError
    message.kind = KEYS
    message.bits = np.packbits(np.frombuffer(data, bool), bitorder="little").tobytes()
    return len(data)
