"""Results of eager PyTorch: the reference of every parity test."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.text import TextAttention

Array = NDArray[Any]
RTOL, ATOL = 1.3e-6, 1e-5


def attend(
    module: MultiHeadAttention | TextAttention, *inputs: Array, mask: Array | None = None
) -> tuple[Array, Array]:
    """Returns context vectors (Tq, d_out) and weights (H, Tq, Tk) of one sequence.

    Args:
        module: In evaluation mode.
        inputs: Query or token ids, then key and value if the module takes them, each (T, ...).
        mask: Broadcast to (H, Tq, Tk); True if the row may attend to the key.
    """
    batch = [torch.from_numpy(np.ascontiguousarray(array))[None] for array in inputs]
    options = {}
    if mask is not None:
        query_length, key_length = len(inputs[0]), len(inputs[min(1, len(inputs) - 1)])
        full = np.broadcast_to(mask, (*mask.shape[:-2][-1:], query_length, key_length))
        full = full if full.ndim == 3 else full[None]
        options["attention_mask"] = torch.from_numpy(full.copy())[None]
    with torch.inference_mode():
        context, _ = module(*batch, **options)
        _, weights = module(*batch, **options, return_weights=True)
    return context[0].numpy(), weights[0].numpy()


def assert_parity(
    served: Array | Sequence[Array], eager: Array | Sequence[Array], *, scale: float = 1.0
) -> None:
    """Compares full tensors within the tolerance of fp32.

    Args:
        served: One array, or one for each sequence.
        eager: The same.
        scale: Standard deviation of the inputs, at least 1.
    """
    pairs = [(served, eager)] if isinstance(eager, np.ndarray) else zip(served, eager, strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=RTOL, atol=ATOL * scale)
