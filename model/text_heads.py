"""Sparse embeddings and token vectors: the parts of text encoders beside or in place of a dense embedding.

Shapes: B batch, T tokens, d width of a token vector, V size of the vocabulary.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.checkpoints.files import read_json
from attention_serving.model.text_module import fast_tokenizer, vocabulary_size

ROUTES: Final = "router_config.json"
# Files of BGE-M3 beside its dense encoder, and how many columns they make of a token vector if that is fixed.
TOKEN_HEADS: Final[Mapping[str, int | None]] = {"sparse": 1, "colbert": None}


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
    from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: PLC0415 - takes seconds

    task, names = transformer.transformer_task, [type(module).__name__ for module in after]
    if names == ["SpladePooling"] and task == "fill-mask":
        return [SpladePooling(after[0].pooling_strategy, after[0].activation_function)]
    is_autoencoder = names[-1:] == ["SparseAutoEncoder"] and task == "feature-extraction"
    if is_autoencoder and isinstance(after[0], Pooling):
        return [*after[:-1], SparseLatents(after[-1])]
    raise CheckpointError(
        f"modules after {task}: {', '.join(names) or 'none'}; a sparse encoder has "
        f"SpladePooling after fill-mask, or Pooling and SparseAutoEncoder after feature-extraction"
    )


def split_routes(library: Any, folder: Path) -> tuple[Any, list[Any], Path]:
    """The module of queries of a SparseEncoder with a Router, those of documents, and the model's folder.

    Raises:
        CheckpointError: Queries are not weights of token ids, or texts of no kind are not documents.
    """
    router, *after = library
    routes, default = router.sub_modules, router.default_route
    names = [type(module).__name__ for module in routes["query"]] if "query" in routes else []
    if after or router.route_mappings or set(routes) != {"query", "document"} or default != "document":
        raise CheckpointError(
            f"{ROUTES}: routes {', '.join(routes)}, of which {default} is the default: only one Router of "
            f"queries and documents, with documents as the default, is supported"
        )
    if names != ["SparseStaticEmbedding"]:
        raise CheckpointError(
            f"{ROUTES}: queries of {', '.join(names)}; only SparseStaticEmbedding is served"
        )
    path = folder / read_json(folder / ROUTES)["structure"]["document"][0]
    return routes["query"][0], [*routes["document"]], path


def read_query_weights(queries: Any, reader: Any, model: Any) -> Tensor:
    """The weights (V,) of the token ids of queries.

    Raises:
        CheckpointError: Queries have other token ids than documents, which are those of a model.
    """
    count, expected = len(queries.weight), vocabulary_size(model)
    if count != expected:
        raise CheckpointError(f"queries have weights of {count} token ids, documents of {expected}")
    if fast_tokenizer(queries.tokenizer).to_str() != fast_tokenizer(reader).to_str():
        raise CheckpointError("the tokenizer of queries is another one than that of documents")
    weights: Tensor = queries.weight.detach().float()
    return weights


def token_modules(transformer: Any, after: Sequence[Any]) -> list[nn.Module]:
    """What follows the model of a MultiVectorEncoder, without its MultiVectorMask.

    Raises:
        CheckpointError: A module or a setting is not supported.
    """
    from sentence_transformers.base.modules import Normalize  # noqa: PLC0415 - takes seconds
    from sentence_transformers.base.modules.dense import Dense  # noqa: PLC0415
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask  # noqa: PLC0415

    if transformer.transformer_task != "feature-extraction":
        raise CheckpointError(f"transformer_task {transformer.transformer_task!r} is not supported")
    for module in after:
        if not isinstance(module, Dense | Normalize | MultiVectorMask):
            raise CheckpointError(
                f"{type(module).__name__} is not supported in a multi-vector encoder, which has a vector for "
                f"each token"
            )
        if isinstance(module, MultiVectorMask) and module.keep_only_token_ids:
            raise CheckpointError("MultiVectorMask: keep_only_token_ids is not supported")
    if sum(isinstance(module, MultiVectorMask) for module in after) != 1:
        raise CheckpointError("a multi-vector encoder needs one MultiVectorMask module")
    return [module for module in after if not isinstance(module, MultiVectorMask)]


def expansion_token(transformer: Any) -> int | None:
    """The token that queries are filled up with; None if they are not.

    Raises:
        CheckpointError: Queries are filled up on the left.
    """
    reader, expansion = transformer.tokenizer, transformer.query_expansion
    if expansion is None:
        return None
    if reader.padding_side != "right":
        raise CheckpointError("query_expansion with padding_side 'left' is not supported")
    if expansion["token"] is not None:
        return int(reader.convert_tokens_to_ids(expansion["token"]))
    return int(reader.eos_token_id if reader.mask_token_id is None else reader.mask_token_id)


def kind_lengths(transformer: Any) -> dict[str, int | None]:
    """By kind of texts, the largest number of tokens; None for that of the model."""
    expansion, most = transformer.query_expansion, transformer.query_length
    if expansion is not None:
        is_fixed = expansion["strategy"] == "fixed"
        most = expansion["length"] if is_fixed else most and max(most, expansion["length"])
    return {"query": most, "document": transformer.document_length}


def read_token_heads(folder: Path, model: Any) -> dict[str, nn.Linear]:
    """The layers of BGE-M3 that make a weight and a vector of each token vector; empty without their files.

    Raises:
        CheckpointError: There is one file of two, or its layer does not fit the model.
    """
    files = {name: folder / f"{name}_linear.pt" for name in TOKEN_HEADS}
    absent = [path.name for path in files.values() if not path.is_file()]
    if len(absent) == len(files):
        return {}
    if absent:
        raise CheckpointError(f"{absent[0]} is missing: the folder has only one of the heads of BGE-M3")
    return {
        name: _read_linear(path, model.config.hidden_size, TOKEN_HEADS[name]) for name, path in files.items()
    }


def _read_linear(path: Path, width: int, columns: int | None) -> nn.Linear:
    """A linear layer of token vectors of a width, of a file with its weight (columns, width) and bias."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the library raises many types, and advises to trust the file
        raise CheckpointError(f"{path.name}: is not a file of tensors only") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()} if isinstance(state, dict) else {}
    columns = columns or next(iter(shapes.get("weight", ())), 0)
    if not columns or shapes != {"weight": (columns, width), "bias": (columns,)}:
        expected = f"weight [{columns or 'columns'}, {width}] and bias"
        raise CheckpointError(f"{path.name}: has {shapes or 'no tensors'}; expected {expected}")
    layer = nn.Linear(width, columns)
    layer.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return layer
