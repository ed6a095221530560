"""The judge: sentence-transformers on this machine, and what it computes if something is changed."""

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from attention_client._values import Array

# A text after its query, or after its kind: query, document or, if the library is not told, empty.
Item = tuple[str, str]
# What is changed, by the names that `Library.compute` describes.
Settings = dict[str, Any]
TEXT_OPTIONS: Final = ("add_special_tokens", "max_length", "padding_side")
ENCODER, CLASSIFIER = "SentenceTransformer", "CrossEncoder"
# What the classes of the library compute.
OUTPUTS: Final = {
    ENCODER: "dense",
    CLASSIFIER: "scores",
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "token_vectors",
}
# Rows of token vectors have room for so many of them: the longest text, cut or not, and tokens beside it.
MOST_VECTORS: Final = 1100


class Library:
    """A model of a folder, in float32 on the CPU. Nothing is downloaded.

    Attributes:
        model: The library's model.
        version: Name and version of the library.
        output: What the model computes: "dense", "sparse" or "token_vectors" of texts, or "scores" of pairs.
        scores: Whether it is scores.
        prompts: The prompts that are not empty, by their names.
        max_tokens: Largest number of tokens of a text or pair; None for no limit.
        pooling: How the vectors of tokens become one; empty if the model has another way.
        normalised: Whether embeddings, or token vectors, have length 1.
        width: Elements of a row: of a dense embedding or of scores, 0; of a sparse embedding, a weight for
            each token id; of token vectors, one after the other, and then zeros.
        modules: The modules by the names of their classes.
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
        if kind not in OUTPUTS:
            raise ValueError(f"{folder} is a {kind}; {', '.join(OUTPUTS)} can be judged")
        options = {"device": "cpu", "local_files_only": True, "model_kwargs": {"dtype": "float32"}}
        self.model = getattr(sentence_transformers, kind)(str(folder), **options)
        self.version = f"sentence-transformers {sentence_transformers.__version__}"
        self.output = OUTPUTS[kind]
        self.scores = self.output == "scores"
        self.prompts: dict[str, str] = {name: text for name, text in self.model.prompts.items() if text}
        self.modules = modules = {type(module).__name__: module for module in list_modules(self.model)}
        most = [self.model.max_seq_length, getattr(modules.get("Transformer"), "document_length", None)]
        self.max_tokens: int | None = min(filter(None, most), default=None)
        self.pooling = getattr(modules.get("Pooling"), "pooling_mode", "")
        self.normalised = "Normalize" in modules
        self.width = 0
        if vectors := {"sparse": 1, "token_vectors": MOST_VECTORS}.get(self.output):
            self.width = vectors * self.model.encode(["a"], show_progress_bar=False)[0].shape[-1]
        self.activation = type(self.model.activation_fn).__name__ if self.scores else ""
        has_labels = self.scores and self.model.num_labels > 1
        self.labels: list[str] = [*self.model.config.id2label.values()] if has_labels else []

    def ids_of(self, item: Item) -> list[int]:
        """The ids of the tokens of a text or pair, with the default prompt or its kind's, and not cut."""
        inputs, text = [item if self.scores else item[1]], {"text": {"truncation": False}}
        kind = "" if self.scores else item[0]
        prompt = self.prompts.get(kind or self.model.default_prompt_name or "")
        options = {"task": kind} if kind and self.output == "sparse" else {}
        features = self.model.preprocess(inputs, prompt=prompt, processing_kwargs=text, **options)
        return list(map(int, features["input_ids"][0]))

    def compute(self, batches: Sequence[Sequence[Item]], settings: Settings | None = None) -> Array:
        """The outputs, float64 (N, d): a row for each item of all batches.

        Args:
            batches: Items that run together.
            settings: What differs from the folder: `prompt`, a text; `normalised`; `activation`, a
                class of torch.nn; `add_special_tokens`, `max_length` and `padding_side` of the tokenizer's
                call; its `truncation_side`; `normalizer`; `item`, a function of items; `overwrite`, a class
                of modules, a feature that they read, and the value in its place; `precision`, a type of
                torch's; `dimensions`, the number of leading elements of an embedding; `max_active_dims`, as
                of the library; `after`, a function of rows; and `CLASS.ATTRIBUTE` of modules.
        """
        import torch  # noqa: PLC0415

        settings, model = settings or {}, self.model
        if precision := settings.get("precision"):
            model = copy.deepcopy(model).to(getattr(torch, precision))
        text = {name: settings[name] for name in TEXT_OPTIONS if name in settings}
        options = {"prompt": settings.get("prompt"), "processing_kwargs": {"text": text}}
        if self.output != "token_vectors":
            options["convert_to_tensor"] = True
        if self.output == "sparse":
            options |= {"convert_to_sparse_tensor": False, "max_active_dims": settings.get("max_active_dims")}
        if self.scores and "activation" in settings:
            options["activation_fn"] = getattr(torch.nn, settings["activation"])()
        change: Callable[[Item], Item] = settings.get("item", lambda item: item)
        rows = []
        with ExitStack() as stack:
            _change_model(stack, model, settings)
            for batch in batches:
                inputs = [change(item) if self.scores else change(item)[1] for item in batch]
                kind = "" if self.scores else change(batch[0])[0]
                run = model.predict if self.scores else getattr(model, f"encode_{kind}" if kind else "encode")
                result = run(inputs, batch_size=len(batch), show_progress_bar=False, **options)
                rows.append(self.stack([row.double().numpy() for row in result]))
        array = self.cut(np.concatenate(rows), settings)
        return array if "after" not in settings else np.asarray(settings["after"](array))

    def stack(self, outputs: Sequence[Any]) -> Array:
        """The rows (B, d) of outputs; sparse embeddings may be weights by their token ids.

        Raises:
            IndexError: A token id is not one of the model's.
            ValueError: Rows of one width are not, or elements are not numbers.
        """
        if not self.width:
            return np.reshape(np.asarray(outputs, np.float64), (len(outputs), -1))
        rows = np.zeros((len(outputs), self.width))
        for row, output in zip(rows, outputs, strict=True):
            if isinstance(output, dict):
                row[[int(index) for index in output]] = [*output.values()]
            else:
                flat = np.asarray(output, np.float64).ravel()[: self.width]
                row[: flat.size] = flat
        return rows

    def cut(self, rows: Array, settings: Settings) -> Array:
        """The rows with the number of elements that the settings state, and normalised as they state."""
        rows = rows[:, : settings.get("dimensions")]
        if self.output == "dense" and settings.get("normalised", self.normalised):
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return rows


def list_modules(model: Any) -> list[Any]:
    """The modules of a model of the library, those of all routes in place of a router."""
    routes = (getattr(module, "sub_modules", {"": [module]}) for module in model)
    return [module for modules in routes for route in modules.values() for module in route]


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
    for module in list_modules(model):
        name = type(module).__name__
        for setting, value in settings.items():
            if setting.startswith(f"{name}."):
                put(module, setting.removeprefix(f"{name}."), value)
        if name == "Normalize" and not settings.get("normalised", True):
            put(module, "forward", lambda features, **_: features)
        if name == kind:
            put(module, "forward", overwrite(module.forward, *change))
