"""Causal rerankers: language models that score a pair by the logits of one token or two after its last token.

Shapes: B batch, T tokens, P tokens of a prefix, L layers, H query heads, Hkv key heads, d width of a head,
C rows of the head: 1 or 2.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.text_encoder import TextClassifier
from attention_serving.model.text_module import with_padding

# The name under which the transformers library has the attention to a prefix.
SHARED_PREFIX: Final = "shared_prefix"
# Kinds of rotary embedding in which the angle of a position does not depend on the length of the sequence.
FIXED_ROTARY: Final = ("default", "linear", "llama3", "yarn")
# Arguments of attention that change its result, which attention to a prefix lacks.
REFUSED: Final = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")


class CausalReranker(TextClassifier):
    """A causal language model and the `LogitScore` of sentence-transformers.

    The score is made of the logits of the true token and the false token. The model has a head of these rows
    only, so that a run computes T x 2 logits and not T x V. It does not take the difference of the two rows
    instead, because some models change logits after the head, as Gemma 2 does.
    """

    def __init__(self, library: Any) -> None:
        transformer, score = library
        ids = [score.true_token_id]
        if score.false_token_id is not None:
            ids.append(score.false_token_id)
        if len(set(ids)) < len(ids):
            raise CheckpointError(
                f"the true and the false token have one id, {ids[0]}, so that every score would be 0: the "
                "tokenizer lacks them. If the folder is that of an encoder, choose its pooling"
            )
        label = library.tokenizer.decode([score.true_token_id]).strip() or str(score.true_token_id)
        super().__init__(library, model=_with_head_of(transformer.auto_model, ids), labels=(label,))
        self.takes_types = False

    def forward(  # type: ignore[override]
        self, token_ids: Tensor, key_lengths: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes scores.

        Args:
            token_ids: (B, T) int64.
            key_lengths: (B,) integers; tokens at and after the length of a sequence are padding. No token
                attends to later ones, so that padding on the right changes nothing.

        Returns:
            As `TextClassifier.forward`: (B, 1).
        """
        token_ids, _ = with_padding(token_ids, key_lengths, self.padding_id)
        logits = self.model(input_ids=token_ids, use_cache=False).logits  # (B, T, C)
        return self._scores(logits, key_lengths)

    def compute_prefix(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a prefix, after the encoding of positions.

        Args:
            token_ids: (B, P) int64.

        Returns:
            Keys and values, each (B, L, Hkv, P, d).

        Raises:
            ValueError: They depend on what follows the prefix, or the attention is of a kind without them.
        """
        rotary = getattr(self.model.config, "rope_parameters", None) or {}
        if (kind := rotary.get("rope_type", "default")) not in FIXED_ROTARY:
            raise ValueError(f"rotary embeddings of the kind {kind} have no shared prefix")
        layers: list[tuple[Tensor, Tensor]] = []
        with self._shared_attention():
            self.model(input_ids=token_ids, use_cache=False, recorded_layers=layers)
        keys, values = (torch.stack(tensors, dim=1) for tensors in zip(*layers, strict=True))
        return keys, values

    def score_suffixes(
        self, token_ids: Tensor, key_lengths: Tensor, prefix_keys: Tensor, prefix_values: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes scores of sequences that begin with one prefix.

        Args:
            token_ids: What follows the prefix in each sequence, (B, T) int64.
            key_lengths: As in `forward`.
            prefix_keys: (1, L, Hkv, P, d).
            prefix_values: The same.

        Returns:
            What `forward` returns for the whole sequences.
        """
        token_ids, _ = with_padding(token_ids, key_lengths, self.padding_id)
        positions = prefix_keys.shape[3] + torch.arange(token_ids.shape[1])
        with self._shared_attention():
            outputs = self.model(
                input_ids=token_ids,
                position_ids=positions[None],
                use_cache=False,
                prefix=(prefix_keys[0], prefix_values[0]),
            )
        return self._scores(outputs.logits, key_lengths)

    def _scores(self, logits: Tensor, key_lengths: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """Scores (B, 1) of logits (B, T, C) at the last token of each sequence."""
        if key_lengths is None:
            rows = logits[:, -1]  # (B, C)
        else:
            last = (key_lengths - 1)[:, None, None].expand(-1, 1, logits.shape[2])
            rows = logits.gather(1, last)[:, 0]
        scores = rows if rows.shape[1] == 1 else rows[:, :1] - rows[:, 1:]
        return scores if self.activation == "identity" else (scores.sigmoid(), scores)

    @contextmanager
    def _shared_attention(self) -> Iterator[None]:
        """Computes attention with `attend_with_prefix` while the block runs."""
        from transformers import AttentionInterface  # noqa: PLC0415 - takes seconds

        AttentionInterface.register(SHARED_PREFIX, attend_with_prefix)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(SHARED_PREFIX)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)


def attend_with_prefix(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    prefix: tuple[Tensor, Tensor] | None = None,
    recorded_layers: list[tuple[Tensor, Tensor]] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention of sequences to themselves and to a prefix that all of them share.

    The prefix is not repeated for each sequence: its products with the queries broadcast.

    Args:
        module: The layer, with `layer_idx`.
        query: (B, H, T, d).
        key: (B, Hkv, T, d).
        value: The same.
        attention_mask: None.
        scaling: Factor of the scores.
        prefix: Keys and values of the prefix in all layers, each (L, Hkv, P, d); None without one.
        recorded_layers: Receives the keys and values of the layer.
        options: Other arguments of the library.

    Returns:
        (B, T, H, d), as the library's own functions return it, and no attention weights.

    Raises:
        ValueError: The layer needs what this does not compute.
    """
    wrong = [name for name in REFUSED if options.get(name) is not None]
    if wrong or attention_mask is not None:
        raise ValueError(f"attention with {', '.join(wrong) or 'a mask'} has no shared prefix")
    if recorded_layers is not None:
        recorded_layers.append((key, value))
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    # Queries by the head of their keys: (B, Hkv, G, T, d).
    query = query.reshape(batch, groups, heads // groups, length, width) * scaling
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (query @ key[:, :, None].transpose(-1, -2)).masked_fill(later, float("-inf"))  # (..., T, T)
    if prefix is None:
        context = scores.softmax(dim=-1) @ value[:, :, None]  # (B, Hkv, G, T, d)
    else:
        prefix_key, prefix_value = (tensors[module.layer_idx] for tensors in prefix)  # (Hkv, P, d)
        count = prefix_key.shape[1]
        prefix_scores = query.flatten(2, 3) @ prefix_key.transpose(-1, -2)  # (B, Hkv, G T, P)
        scores = torch.cat([prefix_scores.reshape(*scores.shape[:-1], count), scores], dim=-1)
        weights = scores.softmax(dim=-1)  # (B, Hkv, G, T, P + T)
        context = weights[..., count:] @ value[:, :, None]
        context = context + (weights[..., :count].flatten(2, 3) @ prefix_value).reshape(context.shape)
    return context.reshape(batch, heads, length, -1).transpose(1, 2), None


def _with_head_of(model: Any, ids: Sequence[int]) -> Any:
    """A copy of a language model with the same weights, whose head has the rows of some tokens only."""
    head = model.get_output_embeddings()
    rows = nn.Linear(head.in_features, len(ids), bias=head.bias is not None)
    rows.load_state_dict({name: weights[list(ids)] for name, weights in head.state_dict().items()})
    small = copy.copy(model)
    small._modules = dict(model._modules)
    small.set_output_embeddings(rows)
    if model.get_output_embeddings() is not head:  # it is in a module that both have
        raise CheckpointError(f"the head of {type(model).__name__} is not supported")
    return small
