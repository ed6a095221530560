"""Text encoders and classifiers: what sentence-transformers loads from a folder, as modules of token ids.

Shapes: B batch, T tokens, L layers, H heads, d width of a token vector.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.text_module import TextModule, is_causal, run, some_ids, with_padding

Activation: TypeAlias = Literal["sigmoid", "softmax", "identity"]
# The outputs that may hold the embedding that a model computes itself.
OWN_OUTPUTS: Final = ("text_embeds", "pooler_output")
# Towers that were trained on texts padded to one length, all of whose tokens attend to the padding.
PADDED: Final = ("siglip_text_model",)


class TextEncoder(TextModule):
    """A model of the transformers library, and the modules of sentence-transformers that follow it.

    Attributes:
        after: Pooling and what follows it.
        pooling: How an embedding is made of the token vectors: names of POOLINGS, whose vectors are
            concatenated.
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
    ) -> None:
        super().__init__(model, reader, library)
        self.after = nn.ModuleList(after)
        self.pooling = pooling
        if self.max_tokens is not None:
            reader.model_max_length = self.max_tokens  # where the library cuts texts
        self.is_causal = is_causal(model)
        self.heads, self.has_tokens = (0, 0), "last_hidden_state" in run(model, some_ids(model))
        is_padded = model.config.model_type in PADDED
        self.padded_length = (self.max_tokens or 0) if is_padded else 0
        self._attention: str = model.config._attn_implementation

    @property
    def dimensions(self) -> int | None:
        """Number of leading elements that the folder cuts embeddings to; None for all."""
        return None if self.library is None else self.library.truncate_dim

    def forward(
        self,
        token_ids: Tensor,
        key_lengths: Tensor | None = None,
        *,
        return_tokens: bool = False,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Computes the embeddings, and on request what they are made of.

        Args:
            token_ids: (B, T) int64, from 0 to below the size of the vocabulary.
            key_lengths: (B,) integers; tokens at and after the length of a sequence are padding.
            return_tokens: Whether to return the token vectors.
            return_weights: Whether to return the attention weights of every layer.

        Returns:
            Embeddings (B, embedding width); token vectors (B, T, d) or None; attention weights
            (B, L, H, T, T) or None. Vectors of padding, and weights of its rows, are 0.
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
        with self._attention_of("eager" if return_weights else self._attention):
            outputs = self.model(
                input_ids=token_ids,
                attention_mask=None if self.is_causal or self.padded_length else mask,
                output_attentions=return_weights,
            )
        embeddings = self.pool(outputs, token_ids, mask)
        rows = outputs.last_hidden_state[:, :length] if return_tokens else None
        weights = torch.stack(outputs.attentions, dim=1)[..., :length, :length] if return_weights else None
        if within is not None and rows is not None:
            rows = rows * within[:, :, None]
        if within is not None and weights is not None:
            weights = weights * within[:, None, None, :, None]
        return embeddings, rows, weights

    def pool(self, outputs: Mapping[str, Tensor], token_ids: Tensor, mask: Tensor) -> Tensor:
        """The embeddings (B, embedding width) of what the model computed.

        Args:
            outputs: The outputs of the model.
            token_ids: (B, T).
            mask: (B, T) integers: 0 for padding.
        """
        features: dict[str, Any] = {
            "input_ids": token_ids,
            "attention_mask": mask,
            "token_embeddings": outputs.get("last_hidden_state"),
            "sentence_embedding": next((outputs[name] for name in OWN_OUTPUTS if name in outputs), None),
        }
        for module in self.after:
            features = module(features)
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
