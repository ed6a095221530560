"""Sparse embeddings and token vectors: the parts of text encoders beside or in place of a dense embedding.

Shapes: B batch, T tokens, d width of a token vector, V size of the vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.text_module import fast_tokenizer, vocabulary_size


class SpladePooling(nn.Module):
    """Makes a sparse embedding of logits: the largest weight, or the sum, of each token id over the tokens.

    A weight is log(1 + max(0, logit)), of which the logarithm may be taken again. Formal et al., "SPLADE:
    Sparse Lexical and Expansion Model for First Stage Ranking", 2021, equation 1.
    """

    def __init__(self, strategy: str, activation: str) -> None:
        super().__init__()
        self.takes_largest, self.logarithms = strategy == "max", 2 if activation == "log1p_relu" else 1

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds `sentence_embedding` (B, V) to features with `token_embeddings` (B, T, V)."""
        weights = (features["token_embeddings"] * features["attention_mask"][:, :, None]).relu()
        if self.takes_largest:  # before the logarithms, which keep the order
            weights = weights.amax(dim=1)
        for _ in range(self.logarithms):
            weights = weights.log1p()
        return {**features, "sentence_embedding": weights if self.takes_largest else weights.sum(dim=1)}


class SparseLatents(nn.Module):
    """Makes a sparse embedding of a dense one: all positive latents of the library's sparse autoencoder."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replaces `sentence_embedding` (B, d) by the latents (B, V)."""
        prepared, _ = self.autoencoder.prepare(features["sentence_embedding"])
        return {**features, "sentence_embedding": self.autoencoder.encode_pre_act(prepared).relu()}


def sparse_modules(transformer: Any, after: Sequence[Any]) -> list[nn.Module]:
    """What follows the model of a SparseEncoder.

    Raises:
        CheckpointError: The modules are neither those of SPLADE nor those of a sparse autoencoder.
    """
    task, names = transformer.transformer_task, [type(module).__name__ for module in after]
    if names == ["SpladePooling"] and task == "fill-mask":
        return [SpladePooling(after[0].pooling_strategy, after[0].activation_function)]
    if names[:1] == ["Pooling"] and names[-1] == "SparseAutoEncoder" and task == "feature-extraction":
        return [*after[:-1], SparseLatents(after[-1])]
    raise CheckpointError(
        f"modules after {task}: {', '.join(names) or 'none'}; a sparse encoder has "
        f"SpladePooling after fill-mask, or Pooling and SparseAutoEncoder after feature-extraction"
    )


def split_routes(router: Any) -> tuple[Any, list[Any]]:
    """The module of queries of a Router in a SparseEncoder, and the modules of documents.

    Raises:
        CheckpointError: Queries are not weights of token ids, those that the model of documents has; or texts
            of no kind are not documents.
    """
    routes = {name: [*modules] for name, modules in router.sub_modules.items()}
    names = {name: [type(module).__name__ for module in modules] for name, modules in routes.items()}
    is_usual = names.keys() == {"query", "document"} and names["query"] == ["SparseStaticEmbedding"]
    if not is_usual or router.default_route != "document" or router.route_mappings:
        raise CheckpointError(
            f"a Router of {names}, of which {router.default_route} is the default: only one of queries with "
            f"a SparseStaticEmbedding, and documents as the default, is supported"
        )
    (queries,), documents = routes["query"], routes["document"]
    expected = vocabulary_size(documents[0].auto_model)
    if len(queries.weight) != expected:
        raise CheckpointError(
            f"queries have weights of {len(queries.weight)} token ids, documents of {expected}"
        )
    if fast_tokenizer(queries.tokenizer).to_str() != fast_tokenizer(documents[0].tokenizer).to_str():
        raise CheckpointError("the tokenizer of queries is another one than that of documents")
    return queries, documents


def token_modules(transformer: Any, after: Sequence[Any]) -> list[nn.Module]:
    """What follows the model of a MultiVectorEncoder, without its MultiVectorMask.

    Raises:
        CheckpointError: A module or a setting is not supported.
    """
    names = [type(module).__name__ for module in after]
    task, masks = transformer.transformer_task, names.count("MultiVectorMask")
    if task != "feature-extraction" or masks != 1 or {*names} - {"Dense", "Normalize", "MultiVectorMask"}:
        raise CheckpointError(
            f"modules after {task}: {', '.join(names)}; a multi-vector encoder has one MultiVectorMask after "
            f"feature-extraction, and Dense and Normalize modules"
        )
    if after[names.index("MultiVectorMask")].keep_only_token_ids:
        raise CheckpointError("MultiVectorMask: keep_only_token_ids is not supported")
    return [module for module, name in zip(after, names, strict=True) if name != "MultiVectorMask"]


def expansion_token(transformer: Any) -> int:
    """The token that the library fills queries up with, which have an expansion."""
    query = transformer.preprocess([""], task="query")
    return int(query["input_ids"][query["query_expansion_positions"]][-1])


def kind_limits(transformer: Any) -> dict[str, int | None]:
    """By kind of texts, the largest number of tokens; None for that of other texts."""
    expansion, most = transformer.query_expansion, transformer.query_length
    if expansion is not None and expansion["strategy"] == "fixed":
        most = expansion["length"]
    return {"query": most, "document": transformer.document_length}


def read_token_heads(folder: Path, model: Any) -> dict[str, nn.Linear]:
    """The layers of BGE-M3 that make a weight and a vector of each token vector; empty without their files.

    Raises:
        CheckpointError: One of the two files is missing, or is not a layer of such vectors.
    """
    files = {name: folder / f"{name}_linear.pt" for name in ("sparse", "colbert")}
    layers = dict[str, nn.Linear]()
    for name, path in files.items() if any(path.is_file() for path in files.values()) else ():
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            columns = 1 if name == "sparse" else len(state["weight"])
            layers[name] = nn.Linear(model.config.hidden_size, columns)
            layers[name].load_state_dict(state)
        except Exception as error:  # the library raises many types, and advises to trust the file
            rows = 1 if name == "sparse" else "columns"
            expected = f"weight [{rows}, {model.config.hidden_size}] and bias [{rows}]"
            raise CheckpointError(f"{path.name}: must be a file of two tensors: {expected}") from error
    return layers
