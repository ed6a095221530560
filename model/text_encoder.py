"""Text encoders: what sentence-transformers loads from a folder, as one module of token ids.

The library reads the folder: model, tokenizer, pooling, lengths and prompts are its own objects. Nothing is
downloaded, and code that a folder brings along runs only if the caller trusts it.

Shapes: B batch, T tokens, L layers, H heads, d width of a token vector.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from attention_serving.model.checkpoints import CheckpointError, summarise
from attention_serving.model.checkpoints.files import read_json
from attention_serving.model.config import POOLINGS

M = TypeVar("M", bound="_TextModule")
Activation: TypeAlias = Literal["sigmoid", "softmax", "identity"]
MODULES: Final = "modules.json"
ADAPTER: Final = "adapter_config.json"
# The embedding that a model computes itself.
OWN_POOLING: Final = "own"
# The outputs that may hold it, and the models that are used by it.
OWN_OUTPUTS: Final = ("text_embeds", "pooler_output")
USED_BY_OWN: Final = ("clip", "clip_text_model", "dpr", "siglip", "siglip_text_model")
# Classes of towers for texts by type of model, and ends of names of classes that AutoModel does not choose.
TEXT_TOWERS: Final = {
    "clip": "CLIPTextModelWithProjection",
    "siglip": "SiglipTextModel",
    "siglip_text_model": "SiglipTextModel",
}
SPECIAL_CLASSES: Final = ("WithProjection", "ContextEncoder", "EncoderModel")
# Towers that were trained on texts padded to one length, all of whose tokens attend to the padding.
PADDED: Final = ("siglip_text_model",)
# The end of the names of classes that score texts.
CLASSIFIER: Final = "ForSequenceClassification"
# Parameters that an embedding does not use, unless it is the model's own.
UNUSED: Final = ("pooler.", "decoder.")
# The library states a length beyond this for tokenizers without a limit.
ENDLESS: Final = 10**9
FLOAT32: Final[Mapping[str, Any]] = {"torch_dtype": torch.float32}
# Lengths of the sequences that show how a model computes, and what differences are rounding.
LENGTH, PADDED_LENGTHS = 6, (3, 17, 65, 513)
ROUNDING: Final = 1e-4


class _TextModule(nn.Module):
    """A model of the transformers library, and its tokenizer.

    Attributes:
        model: From token ids to token vectors or logits.
        reader: The tokenizer of the transformers library.
        tokenizer: What it runs, without truncation and padding.
        library: The SentenceTransformer or CrossEncoder of the folder; None for a folder of an encoder that
            transformers wrote.
        max_tokens: Largest number of tokens of a text or pair; None if there is no limit.
        mixes: Whether the result of a text is the same beside padding.
        notes: What the libraries warned of while they read the folder.
    """

    def __init__(self, model: Any, reader: Any, library: Any) -> None:
        super().__init__()
        self.model: Any = model
        self.reader, self.tokenizer = reader, fast_tokenizer(reader)
        self._library = [library]  # in a list, so that it is not a part of this module
        self.max_tokens = _max_tokens(model, reader, None if library is None else library.max_seq_length)
        self.padding_id: int = reader.pad_token_id or 0
        self.mixes = True
        self.notes: tuple[str, ...] = ()

    @property
    def library(self) -> Any:
        """See the attributes."""
        return self._library[0]


class TextEncoder(_TextModule):
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
        self.heads, self.has_tokens = (0, 0), "last_hidden_state" in _run(model, _some_ids(model))
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


def load_encoder(
    path: str | PathLike[str], *, pooling: str = "", trust_remote_code: bool = False
) -> TextEncoder:
    """Reads the text encoder of a folder, in float32 and evaluation mode.

    Args:
        path: A folder of sentence-transformers, or one of transformers: config.json, weights, tokenizer.
        pooling: One of `POOLINGS`, for folders that do not state it. Default: the model's own embedding for
            text towers and retrievers, the last token for causal models, otherwise the mean.
        trust_remote_code: Whether code that the folder brings along may run.

    Raises:
        CheckpointError: A library is missing or cannot read the folder, or what it reads cannot be served
            with the same results. The message says what.
    """
    is_of_sentences = (Path(path) / MODULES).exists()
    read = partial(_read_sentence_encoder if is_of_sentences else _read_plain_encoder, pooling=pooling)
    return _read(path, read, trusted=trust_remote_code)


def _read(path: str | PathLike[str], read: Callable[[Path, dict[str, Any]], M], *, trusted: bool) -> M:
    """The module of a folder, with the errors and warnings of the libraries, and what a run of it shows."""
    folder, options = Path(path), {"local_files_only": True, "trust_remote_code": trusted}
    if not folder.is_dir():
        raise CheckpointError(f"{path}: is not a folder")
    if find_spec("sentence_transformers") is None:
        raise CheckpointError("text encoders need sentence-transformers, which the extra `export` installs")
    try:
        with library_warnings() as notes:
            module = read(folder, options).eval()
            module.mixes = _mixes(module)
            if isinstance(module, TextEncoder):
                module.heads = _heads(module)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # the libraries raise many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path}: cannot be read: {reason[:500]}") from error
    module.notes = tuple(notes)
    return module.requires_grad_(requires_grad=False)


def _read_sentence_encoder(folder: Path, options: dict[str, Any], *, pooling: str) -> TextEncoder:
    """The encoder of a folder of sentence-transformers."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - takes seconds
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: PLC0415

    if pooling:
        raise CheckpointError(f"pooling {pooling!r}: the folder states its own")
    library = SentenceTransformer(str(folder), device="cpu", model_kwargs={**FLOAT32}, **options)
    if not isinstance(library[0], Transformer):
        raise CheckpointError(f"{MODULES}: {type(library[0]).__name__} cannot be the first module")
    poolings = [module for module in library if isinstance(module, Pooling)]
    if any(library.prompts.values()) and not all(module.include_prompt for module in poolings):
        raise CheckpointError("include_prompt: false is not supported for a model with prompts")
    modes: list[str] = []
    for module in poolings:
        modes += [module.pooling_mode] if isinstance(module.pooling_mode, str) else module.pooling_mode
    names = {theirs: ours for ours, theirs in POOLINGS.items()}
    path = folder / read_json(folder / MODULES)[0]["path"]
    model = _with_all_weights(library[0].auto_model, path, options, uses_own=not modes)
    kinds = tuple(names[mode] for mode in modes) or (OWN_POOLING,)
    return TextEncoder(model, [*library][1:], library.tokenizer, kinds, library)


def _read_plain_encoder(folder: Path, options: dict[str, Any], *, pooling: str) -> TextEncoder:
    """The encoder of a folder of transformers, with a pooling."""
    import transformers  # noqa: PLC0415 - takes seconds
    from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: PLC0415

    config = transformers.AutoConfig.from_pretrained(folder, **options)
    reader = transformers.AutoTokenizer.from_pretrained(folder, **options)
    kind, (architecture, *_) = config.model_type, config.architectures or [""]
    special = architecture if architecture.endswith(SPECIAL_CLASSES) else "AutoModel"
    loader = getattr(transformers, TEXT_TOWERS.get(kind, special))
    uses_own = pooling == OWN_POOLING or (not pooling and kind in USED_BY_OWN)
    model = loader.from_pretrained(folder, **options, **FLOAT32)
    model = _with_all_weights(model, folder, options, uses_own=uses_own)
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    pooling = OWN_POOLING if uses_own else pooling or ("last" if is_causal(model) else "mean")
    after = [] if uses_own else [Pooling(model.config.hidden_size, POOLINGS[pooling])]
    return TextEncoder(model, after, reader, (pooling,))


def _with_all_weights(model: Any, folder: Path, options: Mapping[str, Any], *, uses_own: bool) -> Any:
    """The model of a folder, if its weights are all there; adapters are merged into them.

    Raises:
        CheckpointError: The library made up weights that an embedding depends on.
    """
    if (folder / ADAPTER).exists():
        if find_spec("peft") is None:
            raise CheckpointError(f"{ADAPTER}: weights with an adapter need peft, which merges them")
        from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415 - an optional library

        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.merge()
        return model
    _, info = type(model).from_pretrained(folder, output_loading_info=True, **options, **FLOAT32)
    unused = () if uses_own else UNUSED
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(unused))
    if missing or info["mismatched_keys"]:
        names = missing or [str(name) for name, *_ in info["mismatched_keys"]]
        raise CheckpointError(f"the weights lack {summarise(names)}, or have another shape there")
    return model


class TextClassifier(_TextModule):
    """A model of the transformers library that scores texts, or pairs of texts.

    Attributes:
        labels: The names of the L scores.
        activation: What is applied to the logits: sigmoid, softmax or identity.
        takes_types: Whether the model tells the two texts of a pair apart.
    """

    def __init__(self, library: Any) -> None:
        super().__init__(library[0].auto_model, library.tokenizer, library)
        config = self.model.config
        self.labels = tuple(str(config.id2label[index]) for index in range(config.num_labels))
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
    ) -> Tensor:
        """Computes scores.

        Args:
            token_ids: (B, T) int64.
            token_types: (B, T) int64: which text of a pair a token belongs to.
            key_lengths: (B,) integers; tokens at and after the length of a sequence are padding.

        Returns:
            (B, L), after the activation.
        """
        token_ids, within = with_padding(token_ids, key_lengths, self.padding_id)
        mask = torch.ones_like(token_ids) if within is None else within.long()
        types = {} if token_types is None else {"token_type_ids": token_types}
        logits: Tensor = self.model(input_ids=token_ids, attention_mask=mask, **types).logits
        if self.activation == "softmax":
            return logits.softmax(dim=-1)
        return logits.sigmoid() if self.activation == "sigmoid" else logits


def load(
    path: str | PathLike[str], *, pooling: str = "", trust_remote_code: bool = False
) -> TextEncoder | TextClassifier:
    """Reads the text encoder of a folder, or its classifier if the folder says that it is one.

    Arguments and errors are those of `load_encoder`.
    """
    config_file = Path(path) / "config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if not any(str(name).endswith(CLASSIFIER) for name in architectures or ()):
        return load_encoder(path, pooling=pooling, trust_remote_code=trust_remote_code)
    if pooling:
        raise CheckpointError(f"{path}: pooling {pooling!r}: the folder is a classifier")
    return _read(path, _read_classifier, trusted=trust_remote_code)


def _read_classifier(folder: Path, options: dict[str, Any]) -> TextClassifier:
    from sentence_transformers import CrossEncoder  # noqa: PLC0415 - takes seconds

    library = CrossEncoder(str(folder), device="cpu", model_kwargs={**FLOAT32}, **options)
    _with_all_weights(library[0].auto_model, folder, options, uses_own=True)
    return TextClassifier(library)


def is_causal(model: Any) -> bool:
    """Whether a token of a model attends to earlier tokens only, as a run of it shows."""
    ids = _some_ids(model)
    other = ids.clone()
    other[0, -1] = ids[0, 0]
    rows = [_run(model, token_ids).get("last_hidden_state") for token_ids in (ids, other)]
    return rows[0] is not None and torch.equal(rows[0][:, :-1], rows[1][:, :-1])


@torch.inference_mode()
def _run(model: Any, token_ids: Tensor) -> Any:
    """The outputs of a model in evaluation mode for (B, T) token ids without padding."""
    return model.eval()(input_ids=token_ids, attention_mask=torch.ones_like(token_ids))


def vocabulary_size(model: Any) -> int:
    """The number of token ids that a model has an embedding for."""
    return int(model.get_input_embeddings().weight.shape[0])


def _some_ids(model: Any, *, length: int = LENGTH) -> Tensor:
    """Token ids (1, T) that differ from each other where the vocabulary allows."""
    return torch.linspace(0, vocabulary_size(model) - 1, length + 2).long()[None, 1:-1]


def _max_tokens(model: Any, reader: Any, limit: int | None) -> int | None:
    """The largest number of tokens: the limit of the library or tokenizer, or of tables of positions."""
    limits = [limit or reader.model_max_length, getattr(model.config, "max_position_embeddings", None)]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # Tables that count from the id of padding have no rows for it and for those before it.
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - unused)
    return min((int(limit) for limit in limits if limit is not None and 0 < limit < ENDLESS), default=None)


def _mixes(module: _TextModule) -> bool:
    """Whether embeddings or scores are the same beside padding, of texts of several lengths."""
    lengths = {min(length, module.max_tokens or length) for length in PADDED_LENGTHS}
    return all(_is_equal_beside_padding(module, length) for length in lengths)


def _is_equal_beside_padding(module: _TextModule, length: int) -> bool:
    """Compares a text of so many tokens, one of half of them and one of a token, together and alone."""
    ids, lengths = _some_ids(module.model, length=length), [length, length // 2, 1]
    with torch.inference_mode():
        results = [module(ids[:, :count]) for count in lengths]
        padded = module(ids.expand(len(lengths), -1), key_lengths=torch.tensor(lengths))
    if isinstance(module, TextEncoder):
        results, padded = [result[0] for result in results], padded[0]
    alone = torch.cat(results)
    return torch.allclose(alone, padded, rtol=0, atol=ROUNDING * float(alone.abs().max()))


def _heads(encoder: TextEncoder) -> tuple[int, int]:
    """The numbers of layers and heads of the attention weights; 0 if there is not one for each pair."""
    ids = _some_ids(encoder.model)
    try:
        with torch.inference_mode():
            weights = encoder(ids, return_weights=True)[2]
    except (TypeError, RuntimeError, ValueError):  # of layers without weights, and of unequal shapes
        return 0, 0
    is_of_pairs = weights is not None and weights.ndim == 5 and weights.shape[-2:] == (LENGTH, LENGTH)  # noqa: PLR2004
    return (weights.shape[1], weights.shape[2]) if is_of_pairs else (0, 0)


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
    if reader.truncation_side != "right":
        raise CheckpointError("tokenizer_config.json: truncation_side='left' is not supported")
    tokenizer = Tokenizer.from_str(reader.backend_tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def library_warnings() -> Iterator[list[str]]:
    """Collects what the libraries warn of while the block runs, in place of showing it."""
    from transformers.utils import logging as library_logging  # noqa: PLC0415 - takes seconds

    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("transformers", "sentence_transformers")]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield warnings
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
        library_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
