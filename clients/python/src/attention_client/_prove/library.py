"""The judge: sentence-transformers on this machine, and what it computes with one thing changed."""

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from attention_client._values import Array

# A query, empty for encoders, and a text.
Item = tuple[str, str]
# What is changed, by the names that `Library.compute` describes.
Settings = dict[str, Any]
TEXT_OPTIONS: Final = ("add_special_tokens", "max_length", "padding_side")
KINDS: Final = ("SentenceTransformer", "CrossEncoder")


class Library:
    """A model of a folder, in float32 on the CPU. Nothing is downloaded.

    Attributes:
        scores: Whether the model scores pairs of texts, rather than embedding texts.
        prompt: The prompt that is put before texts unless a request names another one.
        max_tokens: Largest number of tokens of a text or pair; None for no limit.
        pooling: How vectors of tokens become one; empty if the model has another way.
        normalised: Whether embeddings have length 1.
        activation: The class of the function of scores.
        labels: Labels of a text classifier; empty for an encoder or a reranker.
    """

    def __init__(self, folder: Path) -> None:
        import sentence_transformers  # noqa: PLC0415 - takes seconds, and an extra
        from transformers.utils import logging  # noqa: PLC0415

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        config, settings = _read(folder / "config.json"), _read(folder / "config_sentence_transformers.json")
        is_classifier = str(config.get("architectures", "")).endswith("ForSequenceClassification']")
        kind = "CrossEncoder" if is_classifier else settings.get("model_type", KINDS[0])
        if kind not in KINDS:
            raise ValueError(f"the folder is a {kind}; {' and '.join(KINDS)} can be judged")
        options = {"device": "cpu", "local_files_only": True, "model_kwargs": {"dtype": "float32"}}
        self.model = getattr(sentence_transformers, kind)(str(folder), **options)
        self.version = f"sentence-transformers {sentence_transformers.__version__}"
        self.scores = kind == "CrossEncoder"
        self.prompts: dict[str, str] = {name: text for name, text in self.model.prompts.items() if text}
        self.prompt = self.prompts.get(self.model.default_prompt_name or "", "")
        self.max_tokens: int | None = self.model.max_seq_length
        modules = {type(module).__name__: module for module in self.model}
        self.pooling = getattr(modules.get("Pooling"), "pooling_mode", "")
        self.normalised = "Normalize" in modules
        self.activation = type(self.model.activation_fn).__name__ if self.scores else ""
        is_reranker = not self.scores or self.model.num_labels == 1
        self.labels: list[str] = [] if is_reranker else [*self.model.config.id2label.values()]

    def count_ids(self, item: Item) -> list[int]:
        """The ids of the tokens of a text or pair, with the default prompt, and not cut."""
        text = {"text": {"truncation": False}}
        inputs = [item if self.scores else item[1]]
        ids = self.model.preprocess(inputs, prompt=self.prompt, processing_kwargs=text)["input_ids"]
        return list(map(int, ids[0]))

    def compute(self, batches: Sequence[Sequence[Item]], settings: Settings | None = None) -> Array:
        """The embeddings or scores, float64 (B, d): a row for each item of all batches.

        Args:
            batches: Items that run together.
            settings: What differs from the folder: `prompt`, a text; `pooling`; `normalised`; `activation`, a
                class of torch.nn; `add_special_tokens`, `max_length` and `padding_side` of the tokenizer's
                call; its `truncation_side`; `normalizer`; `item`, a function of items; `overwrite`, a class
                of modules, a feature that they read, and the value in its place; `precision`, a type of
                torch's; `dimensions`, the number of leading elements of an embedding.
        """
        import torch  # noqa: PLC0415

        settings, model = settings or {}, self.model
        if precision := settings.get("precision"):
            model = copy.deepcopy(model).to(getattr(torch, precision))
        text = {name: settings[name] for name in TEXT_OPTIONS if name in settings}
        options = {"prompt": settings.get("prompt"), "processing_kwargs": {"text": text}}
        if self.scores:
            name = settings.get("activation", "")
            options["activation_fn"] = getattr(torch.nn, name)() if name else model.activation_fn
        change: Callable[[Item], Item] = settings.get("item", lambda item: item)
        rows = []
        with ExitStack() as stack:
            _change_objects(stack, model, settings)
            for batch in batches:
                items = [change(item) for item in batch]
                inputs = items if self.scores else [item[1] for item in items]
                run = model.predict if self.scores else model.encode
                output = run(
                    inputs, batch_size=len(batch), show_progress_bar=False, convert_to_tensor=True, **options
                )
                rows.append(output.double().numpy().reshape(len(batch), -1))
        array: Array = np.concatenate(rows)[:, : settings.get("dimensions")]
        if not self.scores and settings.get("normalised", self.normalised):
            array = array / np.maximum(np.linalg.norm(array, axis=1, keepdims=True), 1e-12)
        return array


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def _change_objects(stack: ExitStack, model: Any, settings: Settings) -> None:
    """Changes the objects of the library until the stack is closed."""

    def put(target: Any, name: str, value: Any) -> None:
        stack.callback(setattr, target, name, getattr(target, name))
        setattr(target, name, value)

    if side := settings.get("truncation_side"):
        put(model.tokenizer, "truncation_side", side)
    if "normalizer" in settings:
        put(model.tokenizer.backend_tokenizer, "normalizer", settings["normalizer"])
    kind, feature, value = settings.get("overwrite", ("", "", 0))
    for module in model:
        name = type(module).__name__
        if name == "Pooling" and "pooling" in settings:
            put(module, "pooling_mode", settings["pooling"])
        elif name == "Normalize" and not settings.get("normalised", True):
            put(module, "forward", lambda features, **_: features)
        if name == kind:
            put(module, "forward", _overwrite(module.forward, feature, value))


def _overwrite(forward: Callable[..., Any], feature: str, value: int) -> Callable[..., Any]:
    """The function of a module that reads a value in place of a feature."""

    def run(features: dict[str, Any], **options: Any) -> Any:
        if feature in features:
            features = {**features, feature: features[feature].new_full(features[feature].shape, value)}
        return forward(features, **options)

    return run
