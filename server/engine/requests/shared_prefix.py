"""Requests whose sequences begin with the same tokens, as the pairs of one query do: these run once.

A request becomes two, one after the other: the first computes the keys and values of the prefix, and the
sequences of the second attend to them. Any prefix is right, because no token attends to later ones.
"""

import time

import numpy as np

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.requests.request import Plan, Request
from attention_serving.server.engine.types import Array, Context, Result

# What a prefix must save, in seconds: that much takes a further turn in the queue, and the view of the model.
LEAST_GAIN_SECONDS = 1e-3


def prefix_of(request: Request, limits: Limits) -> Request | None:
    """The request that computes what all sequences of a request begin with; None if that saves no time.

    Args:
        request: A request to a model with the graph `prefix`, which has not been submitted.
        limits: The keys and values may take as much memory as a result; and the sequences run whole after
            it, which takes more memory than in blocks.
    """
    model, sequences = request.model, request.sequences
    if len(sequences) == 1:
        return None
    name = model.inputs[0].name
    rows = [sequence.inputs[name] for sequence in sequences]
    length = common_length(rows)
    if not length:
        return None
    plan = model.plan(GraphKind.PREFIX, (length,))
    # Each row of a sequence takes as much of its run: its own layers, and its pairs with all rows.
    saved = sum(
        (sequence.plan.seconds - sequence.plan.fixed_seconds) * length / len(ids)
        for sequence, ids in zip(sequences, rows, strict=True)
    )
    if saved - plan.seconds < LEAST_GAIN_SECONDS or plan.result_bytes > limits.max_result_bytes:
        return None
    if model.run_bytes(GraphKind.SUFFIX, 1, (max(map(len, rows)),)) > limits.max_run_bytes:
        return None
    prefix = Plan(
        graph=GraphKind.PREFIX,
        lengths=((length,),),
        sequences=(plan,),
        required_bytes=plan.result_bytes,
    ).make_request(model, {name: rows[0][:length]}, request.deadline, request.caller)
    prefix.timeline, prefix.is_prefix = request.timeline, True
    return prefix


def follow_prefix(request: Request, prefix: Request, result: Result) -> Request:
    """The request whose sequences are those of a request without their prefix.

    Args:
        request: The request.
        prefix: What `prefix_of` returned for it.
        result: Its result.
    """
    ((length,),) = prefix.plan.lengths
    name = request.model.inputs[0].name
    tensors = {output: arrays[0][np.newaxis] for output, arrays in result.outputs.items()}
    context = Context(id="", nbytes=prefix.plan.required_bytes, length=length, tensors=tensors)
    view = request.model.with_prefix(context)
    rows = [sequence.inputs[name][length:] for sequence in request.sequences]
    plan = Plan(
        graph=GraphKind.SUFFIX,
        lengths=(tuple(map(len, rows)),),
        sequences=tuple(view.plan(GraphKind.SUFFIX, (len(ids),)) for ids in rows),
        required_bytes=request.plan.required_bytes,
    )
    following = plan.make_request(view, {name: np.concatenate(rows)}, request.deadline, request.caller)
    following.timeline = request.timeline
    following.prefix_seconds = time.monotonic() - prefix.queued_at
    return following


def common_length(rows: list[Array]) -> int:
    """How many elements all arrays (T,) begin with, so that at least one of each is left."""
    first, most = rows[0], min(map(len, rows)) - 1
    for ids in rows[1:]:
        differing = np.flatnonzero(ids[:most] != first[:most])
        most = int(differing[0]) if differing.size else most
    return most
