"""What sets a family apart: how its configuration is read, and how its tensors are named."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from attention_serving.model.checkpoints.layouts import StoredTensor
from attention_serving.model.encoder_folder.fields import Fields

LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)")
# Names of functions in configurations, and ours.
ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Members of configurations that do not change what an encoder computes: training, other heads, labels,
# how text is generated, and where a file came from.
WITHOUT_EFFECT: Final = (
    "_*", "architectures", "transformers_version", "torch_dtype", "dtype", "model_type", "initializer_*",
    "*dropout*", "*_dropout", "*drop_rate", "*_token_id", "id2label", "label2id", "num_labels",
    "problem_type", "finetuning_task", "task_specific_params", "use_cache", "output_*", "return_dict*",
    "gradient_checkpointing", "tie_*", "classifier_*", "pooler_*", "summary_*", "torchscript",
    "use_bfloat16", "tf_legacy_loss", "tokenizer_class", "attn_implementation", "prefix",
    "chunk_size_feed_forward", "remove_invalid_values", "exponential_decay_length_penalty",
    "bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "diversity_penalty", "do_sample",
    "early_stopping", "forced_*", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "num_beam*", "num_return_sequences", "repetition_penalty",
    "temperature", "top_k", "top_p", "typical_p", "directionality", "language",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of encoders.

    Attributes:
        model_types: The values of `model_type` in its configurations.
        configure: Arguments of `EncoderConfig` from a configuration, without pooling and `max_tokens`. A
            family without a table of positions adds `max_positions`, the largest number of tokens that the
            configuration states.
        names: By the path of a module here, the path in the file; by the name of a part of a tensor, how it
            is stored. Those of a layer contain {} for its number. A name that begins with / has no prefix.
        prefixes: What may stand before the names of a file, because another head was saved with it.
        neighbours: Patterns of names that are not part of the encoder, with or without prefix.
        pooling: The pooling if the folder does not state one.
    """

    model_types: tuple[str, ...]
    configure: Callable[[Fields], dict[str, Any]]
    names: Mapping[str, str | tuple[str, int, int]]
    prefixes: tuple[str, ...] = ("",)
    neighbours: tuple[str, ...] = ()
    pooling: tuple[str, ...] = ("mean",)

    def stored(self, parameter: str, prefix: str) -> StoredTensor:
        """How a file whose names have a prefix stores a parameter of `TextEncoder`.

        Raises:
            KeyError: The family has no such parameter.
        """
        path, _, kind = parameter.rpartition(".")
        number = ""
        if found := LAYER.fullmatch(path):
            number, path = found.groups()
        name = self.names[path]
        theirs, part, parts = (name, 0, 1) if isinstance(name, str) else name
        whole = theirs[1:] if theirs.startswith("/") else prefix + theirs.format(number)
        return StoredTensor(name=f"{whole}.{kind}", part=part, parts=parts)

    def is_neighbour(self, name: str) -> bool:
        """Whether a name is known and not part of the encoder."""
        names = {name, *(name.removeprefix(prefix) for prefix in self.prefixes)}
        return any(fnmatchcase(each, pattern) for each in names for pattern in self.neighbours)


def activation(fields: Fields, name: str, default: str | None = None) -> str:
    """The function that a configuration names.

    Raises:
        CheckpointError: It is unknown.
    """
    given = fields.text(name, default)
    if given not in ACTIVATIONS:
        raise fields.error(name, given, f"is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[given]


def expect_encoder(fields: Fields) -> None:
    """Refuses a configuration of a decoder, and of heads that were removed."""
    for name in ("is_decoder", "add_cross_attention", "is_encoder_decoder", "cross_attention_hidden_size"):
        fields.expect(name, False)  # noqa: FBT003 - the value
    fields.expect("pruned_heads", {})
    fields.expect("position_embedding_type", "absolute")


def rotary_theta(fields: Fields, given: Mapping[str, Any], default: float) -> float:
    """The base frequency that a configuration states in an object of rotary parameters.

    Raises:
        CheckpointError: The frequencies are scaled, or rotate only a part of each head.
    """
    own = Fields(f"{fields.source}, rotary parameters", given)
    own.expect("rope_type", "default")
    own.expect("type", "default")
    own.expect("partial_rotary_factor", 1.0)
    theta = own.number("rope_theta", default)
    own.finish()
    return theta
