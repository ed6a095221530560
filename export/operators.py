"""What a trace computes in place of operators of PyTorch that the exporter does not know in every form.

Shapes: B batch, H heads, T rows of a sequence, Tq query rows, Tk key rows, d width of a head, D directions,
h width of a recurrent state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flexible_attention

from attention_serving.export.errors import ExportError

HEADS_FORM = 4  # (B, H, T, d)
OPSET = 23
# The gates of PyTorch in the order of ONNX: LSTM i, f, g, o to i, o, f, g; GRU r, z, n to z, r, n.
GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *options: Any, **keywords: Any
) -> Tensor:
    """Attention over (B, H, T, d), in which nothing but masks is broadcast: the exporter knows no other form.

    Rows without heads get one. Axes before the heads become one. Queries, keys and values of one head, or of
    a batch of 1, are expanded.
    """
    tensors = [query, key, value]
    fixed = -3 if keywords.get("enable_gqa") else -2
    outer = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        *(rows.shape[:fixed] for rows in tensors)
    )
    tensors = [
        rows if rows.shape[:fixed] == outer else rows.expand(*outer, *rows.shape[fixed:]) for rows in tensors
    ]
    batch = tensors[0].shape[:-2]
    if attn_mask is not None and len(batch) != HEADS_FORM - 2 and attn_mask.ndim > 2:  # noqa: PLR2004
        attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-2:])
        attn_mask = _with_heads(attn_mask)
    query, key, value = map(_with_heads, tensors)
    result = F.scaled_dot_product_attention(query, key, value, attn_mask, *options, **keywords)
    return result if len(batch) == HEADS_FORM - 2 else result.reshape(*batch, *result.shape[-2:])


def _with_heads(rows: Tensor) -> Tensor:
    """(..., T, d) as (B, H, T, d)."""
    return rows.unsqueeze(-3) if rows.ndim < HEADS_FORM else rows.flatten(0, rows.ndim - HEADS_FORM)


def attention_of_functions(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: Sequence[Any],
    scale: float,
    *_options: Any,
    **_keywords: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """flex_attention with all scores: (B, H, Tq, d), log-sum-exp and largest score (B, H, Tq)."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (rows.repeat_interleave(groups, 1) for rows in (key, value))
    scores = (query @ key.mT).float() * scale  # (B, H, Tq, Tk)
    places = [
        torch.arange(size, device=query.device).view(-1, *(1 for _ in range(3 - axis)))
        for axis, size in enumerate(scores.shape)
    ]
    scores = score_mod(scores, *places)
    scores = torch.where(block_mask[-1](*places), scores, float("-inf"))
    largest = scores.amax(-1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # rows that may attend to nothing are zeros
    return weights.to(value.dtype) @ value, scores.logsumexp(-1), largest


def recurrent(kind: str, **attributes: Any) -> Callable[..., Any]:
    """An LSTM, GRU or RNN of PyTorch as operators of ONNX, one for each layer."""

    def run(
        rows: Tensor,
        state: Any,
        weights: Any,
        has_bias: Any,
        num_layers: int,
        *modes: Any,  # dropout, train, bidirectional, batch_first
    ) -> tuple[Tensor, ...]:
        batch_first = modes[-1]
        rows = rows.transpose(0, 1) if batch_first else rows  # (T, B, width)
        rows, last = _layers(kind, attributes, rows, None, state, weights, has_bias, num_layers)
        return (rows.transpose(0, 1) if batch_first else rows), *last

    return run


def _layers(
    kind: str,
    attributes: Mapping[str, Any],
    rows: Tensor,
    lengths: Tensor | None,
    state: Any,
    weights: Sequence[Tensor],
    has_bias: bool,  # noqa: FBT001
    num_layers: int,
) -> tuple[Tensor, list[Tensor]]:
    """The output (T, B, D * h) of the last layer, and the last states (layers * D, B, h)."""
    states = list(state) if kind == "LSTM" else [state]  # (layers * D, B, h)
    directions = states[0].shape[0] // num_layers
    step = len(weights) // (num_layers * directions)
    if step != (4 if has_bias else 2):
        raise ExportError(f"ONNX has no {kind} with proj_size: use a Linear after it")
    sets = [weights[at : at + step] for at in range(0, len(weights), step)]
    last: list[list[Tensor]] = [[] for _ in states]
    for layer in range(num_layers):
        span = slice(layer * directions, (layer + 1) * directions)
        inputs = [
            torch.stack([_gates(tensor, kind) for tensor in part]) for part in zip(*sets[span], strict=True)
        ]
        biases = [torch.cat(inputs[2:], 1)] if has_bias else [None]
        initial = [values[span] for values in states]
        sizes = (*rows.shape[:2], initial[0].shape[2])  # T, B, h
        outputs = torch.onnx.ops.symbolic_multi_out(
            kind,
            [rows, *inputs[:2], *biases, lengths, *initial],
            {
                "hidden_size": sizes[2],
                "direction": "bidirectional" if directions > 1 else "forward",
                **{name: value * directions for name, value in attributes.items() if isinstance(value, list)},
                **{name: value for name, value in attributes.items() if not isinstance(value, list)},
            },
            dtypes=[rows.dtype] * (1 + len(states)),
            shapes=[(sizes[0], directions, *sizes[1:])] + [(directions, *sizes[1:])] * len(states),
            version=OPSET,
        )
        rows = outputs[0].transpose(1, 2).flatten(2)  # (T, D, B, h) to (T, B, D * h)
        for values, output in zip(last, outputs[1:], strict=True):
            values.append(output)
    return rows, [torch.cat(values) for values in last]


def refuse_packing(*_arguments: Any) -> Any:
    """Refuses pack_padded_sequence."""
    raise ExportError(
        "ONNX has no packed sequences: give the layer padded rows, and mask what it returns for the padding"
    )


def _gates(tensor: Tensor, kind: str) -> Tensor:
    """Weights or biases with their gates in the order of ONNX."""
    chunks = tensor.chunk(len(GATES[kind]))
    return torch.cat([chunks[at] for at in GATES[kind]])


# By operator, what takes its place.
REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: attention,
    flexible_attention: attention_of_functions,
    torch.lstm: recurrent("LSTM"),
    torch.gru: recurrent("GRU", linear_before_reset=1),
    torch.rnn_tanh: recurrent("RNN"),
    torch.rnn_relu: recurrent("RNN", activations=["Relu"]),
    torch._VF._pack_padded_sequence: refuse_packing,
}
