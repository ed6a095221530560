"""Text encoders and classifiers: what sentence-transformers loads from a folder, as modules of token ids.

Shapes: B batch, T tokens, L layers, H heads, d width of a token vector, V size of the vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.text_module import (
    TextModule,
    find_max_tokens,
    is_causal,
    run,
    some_ids,
    vocabulary_size,
    with_padding,
)

Head: TypeAlias = Literal["dense", "sparse", "tokens"]
Activation: TypeAlias = Literal["sigmoid", "softmax", "identity"]
# The outputs that may hold the embedding that a model computes itself.
OWN_OUTPUTS: Final = ("text_embeds", "pooler_output")
# Towers that were trained on texts padded to one length, all of whose tokens attend to the padding.
PADDED: Final = ("siglip_text_model",)


class TextEncoder(TextModule):
    """A model of the transformers library, and the modules of sentence-transformers that follow it.

    Attributes:
        after: Pooling and what follows it, or what projects the token vectors.
        pooling: How a dense embedding is made of the token vectors: names of POOLINGS, whose vectors are
            concatenated. Empty for another head.
        head: What it computes of each text: a dense or a sparse embedding, or its token vectors.
        token_heads: Of BGE-M3, the layers that make a weight and a vector of each token vector: `sparse` and
            `colbert`. Empty for others.
        query_weights: Of an encoder whose queries need no model: the weight of each token id (V,).
        hidden_token: The token that the first id beyond the vocabulary stands for, which others do not attend
            to; None without.
        expanded_length: The number of tokens that queries are filled up to; 0 if they are not.
        token_limits: By kind of texts, and by the empty name for texts of no kind, the largest number of
            tokens. The largest one is `max_tokens`.
        is_causal: Whether tokens attend to earlier tokens only.
        has_tokens: Whether it has a vector for each token.
        heads: The numbers of layers and heads of its attention weights; 0 if it has none.
    """

    def __init__(
        self,
        model: Any,
        after: Iterable[nn.Module],
        reader: Any,
        pooling: tuple[str, ...],
        library: Any = None,
        *,
        head: Head = "dense",
        token_heads: Mapping[str, nn.Linear] | None = None,
        query_weights: Tensor | None = None,
        hidden_token: int | None = None,
        expanded_length: int = 0,
        kind_limits: Mapping[str, int | None] | None = None,
    ) -> None:
        super().__init__(model, reader, library)
        usual = reader.model_max_length
        kinds = {"": None, **(kind_limits or {})}
        self.token_limits: dict[Any, int] = {kind: limit or usual for kind, limit in kinds.items()}
        self.expanded_length = expanded_length
        most = max(expanded_length, *self.token_limits.values())
        self.max_tokens = find_max_tokens(model, most)
        if self.max_tokens is not None and self.max_tokens < most:
            raise CheckpointError(
                f"the model takes {self.max_tokens} tokens, but texts of a kind may have {most}: see "
                f"query_length, document_length, query_expansion, and model_max_length of the tokenizers"
            )
        self.after = nn.ModuleList(after)
        self.pooling = pooling
        self.head, self.hidden_token = head, hidden_token
        self.token_heads = nn.ModuleDict(token_heads)
        self.query_weights = None if query_weights is None else nn.Parameter(query_weights)
        self.is_causal = is_causal(model)
        self.heads, self.has_tokens = (0, 0), "last_hidden_state" in run(model, some_ids(model))
        is_padded = model.config.model_type in PADDED
        self.padded_length = (self.max_tokens or 0) if is_padded else 0
        self._attention: str = model.config._attn_implementation

    @property
    def dimensions(self) -> int | None:
        """Number of leading elements that the folder cuts embeddings to; None for all."""
        return getattr(self.library, "truncate_dim", None)

    @property
    def token_bound(self) -> int:
        """Exclusive upper bound of the token ids."""
        return vocabulary_size(self.model) + (self.hidden_token is not None)

    def forward(
        self,
        token_ids: Tensor,
        key_lengths: Tensor | None = None,
        *,
        return_tokens: bool = False,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Computes what its head is of, and on request what it is made of.

        Args:
            token_ids: (B, T) int64, from 0 to below `token_bound`.
            key_lengths: (B,) integers; tokens at and after the length of a sequence are padding.
            return_tokens: Whether to return the token vectors.
            return_weights: Whether to return the attention weights of every layer.

        Returns:
            Dense embeddings (B, embedding width), sparse ones (B, V), or the token vectors (B, T, d) of a
            multi-vector encoder; token vectors (B, T, d) or None; attention weights (B, L, H, T, T) or None;
            beside token vectors without attention weights, the weights (B, T) of BGE-M3 or None. Vectors and
            weights of padding are 0.
        """
        length = token_ids.shape[1]
        token_ids, within = with_padding(token_ids, key_lengths, self.padding_id)
        if self.padded_length:
            filler = token_ids.new_full((len(token_ids), self.padded_length), self.padding_id)
            token_ids = torch.cat([token_ids, filler[:, length:]], dim=1)
        # Stated even if it hides nothing: without one, some models hide tokens that have the id of padding.
        mask = torch.ones_like(token_ids)
        if within is not None and not self.padded_length:
            mask = within.long()
        if self.hidden_token is not None:
            is_hidden = token_ids == vocabulary_size(self.model)
            token_ids = torch.where(is_hidden, self.hidden_token, token_ids)
            mask = mask * ~is_hidden
        needs_mask = self.hidden_token is not None or not (self.is_causal or self.padded_length)
        with self._attention_of("eager" if return_weights else self._attention):
            outputs = self.model(
                input_ids=token_ids,
                attention_mask=mask if needs_mask else None,
                output_attentions=return_weights,
            )
        result = self.pool(outputs, token_ids, mask)
        rows = outputs.last_hidden_state[:, :length] if return_tokens else None
        weights = torch.stack(outputs.attentions, dim=1)[..., :length, :length] if return_weights else None
        token_weights = None
        if rows is not None and self.token_heads:
            if not return_weights:
                token_weights = self.token_heads["sparse"](rows).squeeze(-1).relu()  # (B, T)
            rows = F.normalize(self.token_heads["colbert"](rows), dim=-1)
        if within is not None:
            result = result * within[:, :, None] if self.head == "tokens" else result
            rows = None if rows is None else rows * within[:, :, None]
            weights = None if weights is None else weights * within[:, None, None, :, None]
            token_weights = None if token_weights is None else token_weights * within
        return result, rows, weights, token_weights

    def weigh(self, token_ids: Tensor) -> Tensor:
        """The weights (B, T) of the token ids (B, T) of queries, of an encoder with `query_weights`."""
        if self.query_weights is None:
            raise ValueError("queries are computed as other texts are")
        return self.query_weights[token_ids]

    def pool(self, outputs: Mapping[str, Tensor], token_ids: Tensor, mask: Tensor) -> Tensor:
        """What the head is of, from what the model computed; see `forward`.

        Args:
            outputs: The outputs of the model.
            token_ids: (B, T).
            mask: (B, T) integers: 0 for padding.
        """
        features: dict[str, Any] = {
            "input_ids": token_ids,
            "attention_mask": mask,
            "token_embeddings": outputs.get("last_hidden_state", outputs.get("logits")),
            "sentence_embedding": next((outputs[name] for name in OWN_OUTPUTS if name in outputs), None),
        }
        for module in self.after:
            features = module(features)
        if self.head == "tokens":
            rows: Tensor = features["token_embeddings"]
            return rows
        embeddings: Tensor = features["sentence_embedding"][:, : self.dimensions]
        return embeddings

    @contextmanager
    def _attention_of(self, implementation: str) -> Iterator[None]:
        """Computes attention in another way while the block runs: one that returns weights."""
        if implementation == self._attention:
            yield
            return
        self.model.set_attn_implementation(implementation)
        try:
            yield
        finally:
            self.model.set_attn_implementation(self._attention)


class TextClassifier(TextModule):
    """A model of the transformers library that scores texts, or pairs of texts.

    Attributes:
        labels: The names of the L scores.
        activation: What is applied to the logits: sigmoid, softmax or identity.
        takes_types: Whether the model tells the two texts of a pair apart.
    """

    def __init__(self, library: Any, *, model: Any = None, labels: tuple[str, ...] = ()) -> None:
        super().__init__(model or library[0].auto_model, library.tokenizer, library)
        config = self.model.config
        self.labels = labels or tuple(str(config.id2label[index]) for index in range(config.num_labels))
        activations: dict[type, Activation] = {nn.Sigmoid: "sigmoid", nn.Identity: "identity"}
        if type(library.activation_fn) not in activations:
            raise CheckpointError(f"activation {type(library.activation_fn).__name__} is not supported")
        self.activation: Activation = activations[type(library.activation_fn)]
        if len(self.labels) > 1:
            is_multiple = config.problem_type == "multi_label_classification"
            self.activation = "sigmoid" if is_multiple else "softmax"
        self.takes_types = "token_type_ids" in self.reader.model_input_names

    def forward(
        self, token_ids: Tensor, token_types: Tensor | None = None, key_lengths: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes scores.

        Args:
            token_ids: (B, T) int64.
            token_types: (B, T) int64: which text of a pair a token belongs to.
            key_lengths: (B,) integers; tokens at and after the length of a sequence are padding.

        Returns:
            (B, L), after the activation; and also before it, unless it is the identity.
        """
        token_ids, within = with_padding(token_ids, key_lengths, self.padding_id)
        mask = torch.ones_like(token_ids) if within is None else within.long()
        types = {} if token_types is None else {"token_type_ids": token_types}
        logits: Tensor = self.model(input_ids=token_ids, attention_mask=mask, **types).logits
        if self.activation == "identity":
            return logits
        return (logits.sigmoid() if self.activation == "sigmoid" else logits.softmax(dim=-1)), logits
