"""The paths from named tensors to outputs: eager PyTorch, attention.v1, Open Inference Protocol.

A case holds the tensors of one rectangular batch by name: query, key, value, token_ids, positions and
attention_mask, as the module's `forward` takes them.
"""

from collections.abc import Callable

import torch
from attention_client import AttentionClient

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.text import TextAttention
from tests.support import triton
from tests.support.eager import Array

Case = dict[str, Array]
Outputs = dict[str, Array]
Path = Callable[[AttentionClient, str, str, Case], Outputs]
NAMES = ["context_vectors", "attention_weights"]


def eager(module: MultiHeadAttention | TextAttention, case: Case) -> Outputs:
    """What the module computes, in evaluation mode."""
    tensors = {key: torch.from_numpy(value) for key, value in case.items()}
    with torch.inference_mode():
        context, _ = module(**tensors)
        _, weights = module(**tensors, return_weights=True)
    return {"context_vectors": context.numpy(), "attention_weights": weights.numpy()}


def _typed(client: AttentionClient, _target: str, name: str, case: Case) -> Outputs:
    """Returns the outputs over attention.v1, through its client."""
    mask, positions = case.get("attention_mask"), case.get("positions")

    def ask(*, return_weights: bool) -> Outputs:
        if "token_ids" in case:
            ids = case["token_ids"]
            answer = client.attend_tokens(name, ids, mask=mask, return_weights=return_weights)
        else:
            inputs = [case[key] for key in ("query", "key", "value") if key in case]
            answer = client.attend(
                name, *inputs, mask=mask, positions=positions, return_weights=return_weights
            )
        weights = {} if answer.attention_weights is None else {"attention_weights": answer.attention_weights}
        return {"context_vectors": answer.context_vectors, **weights}

    return ask(return_weights=True) | ask(return_weights=False)


def _open_inference(_client: AttentionClient, target: str, name: str, case: Case) -> Outputs:
    """Returns the outputs over the Open Inference Protocol."""
    with_weights = triton.infer(target, name, case, NAMES)
    return with_weights | triton.infer(target, name, case, NAMES[:1])


SERVED: dict[str, Path] = {"attention.v1": _typed, "open inference": _open_inference}
