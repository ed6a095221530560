"""Reads text encoders and classifiers from folders, as the libraries of Hugging Face write them.

The library reads the folder: model, tokenizer, pooling, lengths and prompts are its own objects. Nothing is
downloaded, and code that a folder brings along runs only if the caller trusts it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from attention_serving.model.checkpoints import CheckpointError, summarise
from attention_serving.model.checkpoints.files import read_json
from attention_serving.model.config import POOLINGS
from attention_serving.model.text_encoder import TextClassifier, TextEncoder
from attention_serving.model.text_heads import (
    expansion_token,
    kind_limits,
    read_token_heads,
    sparse_modules,
    split_routes,
    token_modules,
)
from attention_serving.model.text_module import LENGTH, TextModule, is_causal, some_ids
from attention_serving.model.text_reranker import CausalReranker

M = TypeVar("M", bound=TextModule)
MODULES: Final = "modules.json"
SETTINGS: Final = "config_sentence_transformers.json"
ADAPTER: Final = "adapter_config.json"
ROUTES: Final = "router_config.json"
# The library's classes of encoders, and that of classifiers and rerankers.
DENSE, SPARSE, MULTI_VECTOR = "SentenceTransformer", "SparseEncoder", "MultiVectorEncoder"
CROSS_ENCODER: Final = "CrossEncoder"
# The type of folders that PyLate wrote, and the architecture of those that ColBERT's authors wrote.
PYLATE, COLBERT = "ColBERT", "HF_ColBERT"
# The embedding that a model computes itself, and the models that are used by it.
OWN_POOLING: Final = "own"
USED_BY_OWN: Final = ("clip", "clip_text_model", "dpr", "siglip", "siglip_text_model")
# Classes of towers for texts by type of model, and ends of names of classes that AutoModel does not choose.
TEXT_TOWERS: Final = {
    "clip": "CLIPTextModelWithProjection",
    "siglip": "SiglipTextModel",
    "siglip_text_model": "SiglipTextModel",
}
SPECIAL_CLASSES: Final = ("WithProjection", "ContextEncoder", "EncoderModel")
# The ends of the names of classes that score texts, and of language models.
CLASSIFIER: Final = "ForSequenceClassification"
LANGUAGE_MODEL: Final = "ForCausalLM"
LOGIT_SCORE: Final = "LogitScore"
CHAT_TEMPLATE: Final = "chat_template.jinja"
# Parameters that an embedding does not use, unless it is the model's own.
UNUSED: Final = ("pooler.", "decoder.")
FLOAT32: Final[Mapping[str, Any]] = {"torch_dtype": torch.float32}
# Lengths of the texts that show whether padding changes results, and what differences are rounding.
PADDED_LENGTHS: Final = (3, 17, 65, 513)
ROUNDING: Final = 1e-4


def load(
    path: str | PathLike[str], *, pooling: str = "", trust_remote_code: bool = False
) -> TextEncoder | TextClassifier:
    """Reads the text encoder of a folder, or its classifier if the folder says that it is one.

    Arguments and errors are those of `load_encoder`.
    """
    if _library_class(Path(path), pooling) != CROSS_ENCODER:
        return load_encoder(path, pooling=pooling, trust_remote_code=trust_remote_code)
    if pooling:
        raise CheckpointError(f"{path}: pooling {pooling!r}: the folder is a classifier")
    return _read(path, _read_classifier, trusted=trust_remote_code)


def _library_class(folder: Path, pooling: str) -> str:
    """The class of the library that reads a folder; empty for an encoder of transformers.

    A language model of transformers may be an encoder or a reranker: it is a reranker if it has a chat
    template, and no pooling is chosen.
    """
    config, tokenizer = (_read_members(folder / name) for name in ("config.json", "tokenizer_config.json"))
    architectures = [str(name) for name in config.get("architectures") or ()]
    if any(name.endswith(CLASSIFIER) for name in architectures):
        return CROSS_ENCODER
    if COLBERT in architectures:
        return MULTI_VECTOR
    if (folder / MODULES).exists():
        model_type = str(_read_members(folder / SETTINGS).get("model_type", DENSE))
        return MULTI_VECTOR if model_type == PYLATE else model_type
    is_language_model = any(name.endswith(LANGUAGE_MODEL) for name in architectures)
    has_template = bool(tokenizer.get("chat_template")) or (folder / CHAT_TEMPLATE).is_file()
    return CROSS_ENCODER if is_language_model and has_template and not pooling else ""


def _read_members(file: Path) -> dict[str, Any]:
    """The members of a JSON file; none if it does not exist or is of another form."""
    members = read_json(file) if file.is_file() else {}
    return members if isinstance(members, dict) else {}


def _read_classifier(folder: Path, options: dict[str, Any]) -> TextClassifier:
    from sentence_transformers import CrossEncoder  # noqa: PLC0415 - takes seconds

    library = CrossEncoder(str(folder), device="cpu", model_kwargs={**FLOAT32}, **options)
    kinds = [type(module).__name__ for module in library]
    if kinds not in (["Transformer"], ["Transformer", LOGIT_SCORE]):
        allowed = f"a Transformer, and a {LOGIT_SCORE} after it"
        raise CheckpointError(f"{MODULES}: has {', '.join(kinds)}; a reranker may have {allowed}")
    _with_all_weights(library[0].auto_model, folder, options, uses_own=True)
    if len(kinds) == 1:
        return TextClassifier(library)
    return CausalReranker(library)


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
    kind = _library_class(Path(path), pooling)
    if kind and pooling:
        raise CheckpointError(f"{path}: pooling {pooling!r}: the folder states its own")
    read: Callable[..., TextEncoder] = partial(_read_plain_encoder, pooling=pooling)
    if kind:
        read = partial(_read_sentence_encoder, kind=kind)
    return _read(path, read, trusted=trust_remote_code)


def _read(path: str | PathLike[str], read: Callable[[Path, dict[str, Any]], M], *, trusted: bool) -> M:
    """The module of a folder, with the errors and warnings of the libraries, and what a run of it shows."""
    folder, options = Path(path), {"local_files_only": True, "trust_remote_code": trusted}
    if not folder.is_dir():
        raise CheckpointError(
            f"{path}: is not a folder. Save the model in one: `hf download NAME --local-dir FOLDER` for a "
            "model of the Hugging Face hub, or SentenceTransformer(NAME).save_pretrained(FOLDER) in Python"
        )
    if find_spec("sentence_transformers") is None:
        raise CheckpointError('text encoders need more packages: pip install "attention-serving[encoders]"')
    try:
        with library_warnings() as notes:
            module = read(folder, options).eval()
            module.supports_padding = _supports_padding(module)
            if isinstance(module, TextEncoder):
                module.heads = _heads(module)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # the libraries raise many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path}: cannot be read: {reason[:500]}") from error
    module.notes = tuple(notes)
    return module.requires_grad_(requires_grad=False)


def _read_sentence_encoder(folder: Path, options: dict[str, Any], *, kind: str) -> TextEncoder:
    """The encoder of a folder that a class of sentence-transformers reads."""
    import sentence_transformers  # noqa: PLC0415 - takes seconds
    from sentence_transformers.base.modules import Router  # noqa: PLC0415
    from sentence_transformers.sentence_transformer.modules import Transformer  # noqa: PLC0415

    if kind not in (DENSE, SPARSE, MULTI_VECTOR):
        raise CheckpointError(f"{SETTINGS}: model_type {kind!r} is not that of a text encoder")
    make = getattr(sentence_transformers, kind)
    library = make(str(folder), device="cpu", model_kwargs={**FLOAT32}, **options)
    modules, heads, path = [*library], dict[str, Any](), folder
    if kind == SPARSE and isinstance(modules[0], Router) and len(modules) == 1:
        queries, modules = split_routes(modules[0])
        limits = {"query": queries.max_seq_length, "document": None}
        heads = {"query_weights": queries.weight.detach().float(), "kind_limits": limits}
        path = folder / read_json(folder / ROUTES)["structure"]["document"][0]
    elif (folder / MODULES).exists():
        path = folder / read_json(folder / MODULES)[0]["path"]
    transformer, *after = modules
    if not isinstance(transformer, Transformer):
        raise CheckpointError(f"{MODULES}: {type(transformer).__name__} cannot be the first module")
    modes = _pooling_modes(library, after)
    if kind == SPARSE:
        after, heads["head"] = sparse_modules(transformer, after), "sparse"
    elif kind == MULTI_VECTOR:
        after, expansion = token_modules(transformer, after), transformer.query_expansion
        heads = {"head": "tokens", "kind_limits": kind_limits(transformer)}
        if expansion is not None:
            heads["expanded_length"] = expansion["length"]
            heads["hidden_token"] = None if expansion["attend"] else expansion_token(transformer)
    else:
        heads = {"token_heads": read_token_heads(folder, transformer.auto_model)}
    uses_own = not modes and kind != MULTI_VECTOR
    model = _with_all_weights(transformer.auto_model, path, options, uses_own=uses_own)
    names = {theirs: ours for ours, theirs in POOLINGS.items()}
    pooling = tuple(names[mode] for mode in modes) or (OWN_POOLING,) if kind == DENSE else ()
    return TextEncoder(model, after, transformer.tokenizer, pooling, library, **heads)


def _pooling_modes(library: Any, modules: Iterable[Any]) -> list[str]:
    """How the modules of a library pool token vectors, in its words."""
    from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: PLC0415 - takes seconds

    poolings = [module for module in modules if isinstance(module, Pooling)]
    if any(library.prompts.values()) and not all(module.include_prompt for module in poolings):
        raise CheckpointError("include_prompt: false is not supported for a model with prompts")
    modes: list[str] = []
    for module in poolings:
        modes += [module.pooling_mode] if isinstance(module.pooling_mode, str) else module.pooling_mode
    return modes


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
    heads = read_token_heads(folder, model)
    return TextEncoder(model, after, reader, (pooling,), token_heads=heads)


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


def _supports_padding(module: TextModule) -> bool:
    """Whether embeddings or scores are the same beside padding, of texts of several lengths."""
    lengths = {min(length, module.max_tokens or length) for length in PADDED_LENGTHS}
    return all(_is_equal_beside_padding(module, length) for length in lengths)


def _is_equal_beside_padding(module: TextModule, length: int) -> bool:
    """Compares a text of so many tokens, one of half of them and one of a token, together and alone."""
    ids, lengths = some_ids(module.model, length=length), [length, length // 2, 1]
    with torch.inference_mode():
        results = [module(ids[:, :count]) for count in lengths]
        padded = module(ids.expand(len(lengths), -1), key_lengths=torch.tensor(lengths))
    if isinstance(padded, tuple):
        results, padded = [result[0] for result in results], padded[0]
    pairs = [(result[0], row[: len(result[0])]) for result, row in zip(results, padded, strict=True)]
    alone, padded = (torch.cat([part.flatten() for part in parts]) for parts in zip(*pairs, strict=True))
    return torch.allclose(alone, padded, rtol=0, atol=ROUNDING * float(alone.abs().max()))


def _heads(encoder: TextEncoder) -> tuple[int, int]:
    """The numbers of layers and heads of the attention weights; 0 if there is not one for each pair."""
    ids = some_ids(encoder.model)
    try:
        with torch.inference_mode():
            weights = encoder(ids, return_weights=True)[2]
    except (TypeError, RuntimeError, ValueError):  # of layers without weights, and of unequal shapes
        return 0, 0
    is_of_pairs = weights is not None and weights.ndim == 5 and weights.shape[-2:] == (LENGTH, LENGTH)  # noqa: PLR2004
    return (weights.shape[1], weights.shape[2]) if is_of_pairs else (0, 0)


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
