"""What text encoders and classifiers have in common: a model of the transformers library, and its tokenizer.

Shapes: B batch, T tokens.
"""

from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from attention_serving.model.checkpoints import CheckpointError

# The library states a length beyond this for tokenizers without a limit.
ENDLESS: Final = 10**9
# Length of a sequence that shows how a model computes.
LENGTH: Final = 6


class TextModule(nn.Module):
    """A model of the transformers library, and its tokenizer.

    Attributes:
        model: From token ids to token vectors or logits.
        reader: The tokenizer of the transformers library.
        tokenizer: What it runs, without truncation and padding.
        library: The SentenceTransformer or CrossEncoder of the folder; None for a folder of an encoder that
            transformers wrote.
        max_tokens: Largest number of tokens of a text or pair; None if there is no limit.
        supports_padding: Whether the result of a text is the same beside padding.
        notes: What the libraries warned of while they read the folder.
    """

    def __init__(self, model: Any, reader: Any, library: Any) -> None:
        super().__init__()
        self.model: Any = model
        self.reader, self.tokenizer = reader, fast_tokenizer(reader)
        self._library = [library]  # in a list, so that it is not a part of this module
        self.max_tokens = find_max_tokens(model, reader.model_max_length)
        if self.max_tokens is not None:
            reader.model_max_length = self.max_tokens  # where the library cuts texts
        self.padding_id: int = reader.pad_token_id or 0
        self.supports_padding = True
        self.notes: tuple[str, ...] = ()

    @property
    def library(self) -> Any:
        """See the attributes."""
        return self._library[0]


def with_padding(
    token_ids: Tensor, key_lengths: Tensor | None, padding_id: int
) -> tuple[Tensor, Tensor | None]:
    """The ids (B, T) with that of padding from the lengths (B,) on; and where no padding is, booleans (B, T).

    Without lengths, no token is padding, and the second is None.
    """
    if key_lengths is None:
        return token_ids, None
    within = torch.arange(token_ids.shape[1], device=token_ids.device) < key_lengths[:, None]
    return torch.where(within, token_ids, padding_id), within


def is_causal(model: Any) -> bool:
    """Whether a token of a model attends to earlier tokens only, as a run of it shows."""
    ids = some_ids(model)
    other = ids.clone()
    other[0, -1] = ids[0, 0]
    rows = [run(model, token_ids).get("last_hidden_state") for token_ids in (ids, other)]
    return rows[0] is not None and torch.equal(rows[0][:, :-1], rows[1][:, :-1])


@torch.inference_mode()
def run(model: Any, token_ids: Tensor) -> Any:
    """The outputs of a model in evaluation mode for (B, T) token ids without padding."""
    return model.eval()(input_ids=token_ids, attention_mask=torch.ones_like(token_ids))


def vocabulary_size(model: Any) -> int:
    """The number of token ids that a model has an embedding for."""
    return int(model.get_input_embeddings().weight.shape[0])


def some_ids(model: Any, *, length: int = LENGTH) -> Tensor:
    """Token ids (1, T) that differ from each other where the vocabulary allows."""
    return torch.linspace(0, vocabulary_size(model) - 1, length + 2).long()[None, 1:-1]


def find_max_tokens(model: Any, limit: int) -> int | None:
    """The largest number of tokens: a limit, or that of tables of positions; None if there is none."""
    limits = [limit, getattr(model.config, "max_position_embeddings", None)]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # Tables that count from the id of padding have no rows for it and for those before it.
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - unused)
    return min((int(limit) for limit in limits if limit is not None and 0 < limit < ENDLESS), default=None)


def fast_tokenizer(reader: Any) -> Tokenizer:
    """The tokenizer that one of the transformers library runs, without truncation and padding.

    Raises:
        CheckpointError: It is written in Python, or does more than a tokenizer.json can say.
    """
    if not reader.is_fast:
        raise CheckpointError(
            f"{type(reader).__name__} is a tokenizer in Python; only those with a tokenizer.json are served"
        )
    if getattr(reader, "split_special_tokens", False):
        raise CheckpointError("tokenizer_config.json: split_special_tokens=True is not supported")
    tokenizer = Tokenizer.from_str(reader.backend_tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
