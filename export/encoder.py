"""Text encoders as artifacts: the signatures of their graphs, and what the manifest states about them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS, CONTEXT_VECTORS, EMBEDDING, EncoderFacts
from attention_serving.artifact.manifest import (
    BATCH_AXIS,
    BLOCK_ROWS,
    KEY_LENGTHS,
    Cost,
    GraphKind,
    TensorSpec,
)
from attention_serving.export.precision import ENCODER_TOLERANCES
from attention_serving.export.signature import QUERY_AXIS, ExportSpec, Signature, tensor
from attention_serving.model.encoder.config import EncoderConfig
from attention_serving.model.encoder_folder.loading import LoadedEncoder

TOKEN_IDS: Final = "token_ids"  # noqa: S105 - the name of an input
KINDS: Final = (
    GraphKind.PLAIN,
    GraphKind.LENGTHS,
    GraphKind.WEIGHTS,
    GraphKind.TOKENS,
    GraphKind.BLOCKS,
)
# Tensors of a token's width that a layer holds at a time: its input, projections, context and sums.
ROW_TENSORS: Final = 6


def encoder_spec(
    loaded: LoadedEncoder, *, dimensions: Sequence[int] = (), truncates: bool = False
) -> ExportSpec:
    """The export of a text encoder, with all its graphs, for `write_artifact`.

    Args:
        loaded: The encoder.
        dimensions: Numbers of elements that embeddings can be shortened to, beside those of the folder.
        truncates: Whether long texts are cut unless a request says otherwise.

    Raises:
        ValueError: A number of dimensions is not below the width of an embedding.
    """
    config = loaded.module.config
    facts = EncoderFacts(
        family=loaded.family,
        layers=len(config.layers),
        width=config.width,
        embedding_width=config.embedding_width,
        row_elements=ROW_TENSORS * config.width + (2 if config.gated else 1) * config.feed_forward,
        pooling=config.pooling,
        normalised=config.normalised,
        dimensions=_dimensions(loaded, dimensions),
        prompts=dict(loaded.prompts),
        default_prompt=loaded.default_prompt,
        truncates=truncates,
    )
    stated = json.loads(json.dumps(asdict(config)))  # as it will be read from the manifest
    return ExportSpec(
        module=loaded.module.eval(),
        signatures=tuple(_signature(config, kind) for kind in KINDS),
        description=(
            f"{loaded.family} text encoder, {len(config.layers)} layers of width {config.width}, "
            f"{' and '.join(config.pooling)} pooling{', normalised' if config.normalised else ''}"
        ),
        identity={"config": stated, "tokenizer": loaded.tokenizer.to_str(), "encoder": facts},
        tolerances=ENCODER_TOLERANCES,
        config=stated,
        num_heads=config.num_heads,
        causal=config.causal,
        cost=Cost(
            flops_per_query=config.flops_per_token, flops_per_key=0, flops_per_pair=config.flops_per_pair
        ),
        tokenizer=loaded.tokenizer,
        encoder=facts,
    )


def _dimensions(loaded: LoadedEncoder, given: Sequence[int]) -> tuple[int, ...]:
    width = loaded.module.config.embedding_width
    if wrong := [size for size in given if not 0 < size < width]:
        raise ValueError(f"dimensions={wrong[0]}: must lie in 1..{width - 1}, below the embedding's width")
    return tuple(sorted({size for size in (*loaded.dimensions, *given) if size < width}))


def _signature(config: EncoderConfig, kind: GraphKind) -> Signature:
    inputs = [tensor(TOKEN_IDS, "int64", BATCH_AXIS, QUERY_AXIS, exclusive_upper_bound=config.vocabulary)]
    if kind not in (GraphKind.PLAIN, GraphKind.BLOCKS):
        inputs.append(tensor(KEY_LENGTHS, "int64", BATCH_AXIS))
    if kind is GraphKind.BLOCKS:
        inputs.append(tensor(BLOCK_ROWS, "int64"))
    returned = {
        "return_tokens": kind in (GraphKind.TOKENS, GraphKind.WEIGHTS),
        "return_weights": kind is GraphKind.WEIGHTS,
    }
    return Signature(
        kind=kind,
        inputs=tuple(inputs),
        outputs=_outputs(config, kind),
        options=returned,
        num_heads=config.num_heads,
        least_key_length=1,
        max_lengths={QUERY_AXIS: config.max_tokens},
    )


def _outputs(config: EncoderConfig, kind: GraphKind) -> tuple[TensorSpec, ...]:
    outputs = [tensor(EMBEDDING, "float32", BATCH_AXIS, config.embedding_width)]
    if kind in (GraphKind.TOKENS, GraphKind.WEIGHTS):
        outputs.append(tensor(CONTEXT_VECTORS, "float32", BATCH_AXIS, QUERY_AXIS, config.width))
    if kind is GraphKind.WEIGHTS:
        sizes = (len(config.layers), config.num_heads)
        outputs.append(tensor(ATTENTION_WEIGHTS, "float32", BATCH_AXIS, *sizes, QUERY_AXIS, QUERY_AXIS))
    return tuple(outputs)
