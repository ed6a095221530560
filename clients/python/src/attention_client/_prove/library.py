"""The judge: sentence-transformers on this machine, and what it computes if something is changed."""

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
ENCODER, CLASSIFIER = "SentenceTransformer", "CrossEncoder"


class Library:
    """A model of a folder, in float32 on the CPU. Nothing is downloaded.

    Attributes:
        model: The library's model.
        version: Name and version of the library.
        scores: Whether the model scores pairs of texts, rather than embedding texts.
        prompts: The prompts that are not empty, by their names.
        max_tokens: Largest number of tokens of a text or pair; None for no limit.
        pooling: How the vectors of tokens become one; empty if the model has another way.
        normalised: Whether embeddings have length 1.
        activation: The class of the function of scores; empty for an encoder.
        labels: Labels of a text classifier; empty for an encoder or a reranker.
    """

    def __init__(self, folder: Path) -> None:
        import sentence_transformers  # noqa: PLC0415 - takes seconds, and an extra
        from transformers.utils import logging  # noqa: PLC0415

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        files = [folder / name for name in ("config.json", "config_sentence_transformers.json")]
        config, settings = (json.loads(file.read_text()) if file.is_file() else {} for file in files)
        is_classifier = "ForSequenceClassification" in str(config.get("architectures"))
        kind = CLASSIFIER if is_classifier else settings.get("model_type", ENCODER)
        if kind not in (ENCODER, CLASSIFIER):
            raise ValueError(f"{folder} is a {kind}; {ENCODER} and {CLASSIFIER} can be judged")
        options = {"device": "cpu", "local_files_only": True, "model_kwargs": {"dtype": "float32"}}
        self.model = getattr(sentence_transformers, kind)(str(folder), **options)
        self.version = f"sentence-transformers {sentence_transformers.__version__}"
        self.scores = kind == CLASSIFIER
        self.prompts: dict[str, str] = {name: text for name, text in self.model.prompts.items() if text}
        self.max_tokens: int | None = self.model.max_seq_length
        modules = {type(module).__name__: module for module in self.model}
        self.pooling = getattr(modules.get("Pooling"), "pooling_mode", "")
        self.normalised = "Normalize" in modules
        self.activation = type(self.model.activation_fn).__name__ if self.scores else ""
        labels = [*self.model.config.id2label.values()] if self.scores else []
        self.labels: list[str] = labels if len(labels) > 1 else []

    def ids_of(self, item: Item) -> list[int]:
        """The ids of the tokens of a text or pair, with the default prompt, and not cut."""
        inputs, text = [item if self.scores else item[1]], {"text": {"truncation": False}}
        prompt = self.prompts.get(self.model.default_prompt_name or "")
        return list(
            map(int, self.model.preprocess(inputs, prompt=prompt, processing_kwargs=text)["input_ids"][0])
        )

    def compute(self, batches: Sequence[Sequence[Item]], settings: Settings | None = None) -> Array:
        """The embeddings or scores, float64 (N, d): a row for each item of all batches.

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
        if self.scores and "activation" in settings:
            options["activation_fn"] = getattr(torch.nn, settings["activation"])()
        change: Callable[[Item], Item] = settings.get("item", lambda item: item)
        rows = []
        with ExitStack() as stack:
            _change_model(stack, model, settings)
            for batch in batches:
                inputs = [change(item) if self.scores else change(item)[1] for item in batch]
                run = model.predict if self.scores else model.encode
                result = run(
                    inputs, batch_size=len(batch), convert_to_tensor=True, show_progress_bar=False, **options
                )
                rows.append(result.double().numpy().reshape(len(batch), -1))
        return self.cut(np.concatenate(rows), settings)

    def cut(self, rows: Array, settings: Settings) -> Array:
        """The rows with the number of elements that the settings state, and normalised as they state."""
        rows = rows[:, : settings.get("dimensions")]
        if not self.scores and settings.get("normalised", self.normalised):
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return rows


def _change_model(stack: ExitStack, model: Any, settings: Settings) -> None:
    """Changes the objects of the library until the stack is closed."""

    def put(target: Any, name: str, value: Any) -> None:
        stack.callback(setattr, target, name, getattr(target, name))
        setattr(target, name, value)

    def overwrite(forward: Any, feature: str, value: int) -> Callable[..., Any]:
        def run(features: Any, **options: Any) -> Any:
            tensors = (
                {feature: features[feature].new_full(features[feature].shape, value)}
                if feature in features
                else {}
            )
            return forward({**features, **tensors}, **options)

        return run

    put(model.tokenizer, "truncation_side", settings.get("truncation_side", model.tokenizer.truncation_side))
    if "normalizer" in settings:
        put(model.tokenizer.backend_tokenizer, "normalizer", settings["normalizer"])
    kind, *change = settings.get("overwrite", ("",))
    for module in model:
        name = type(module).__name__
        if name == "Pooling" and "pooling" in settings:
            put(module, "pooling_mode", settings["pooling"])
        if name == "Normalize" and not settings.get("normalised", True):
            put(module, "forward", lambda features, **_: features)
        if name == kind:
            put(module, "forward", overwrite(module.forward, *change))
