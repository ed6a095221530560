"""Text encoders as artifacts: the signatures of their graphs, and what the manifest states about them."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from attention_serving.artifact.encoder import (
    ATTENTION_WEIGHTS,
    CONTEXT_VECTORS,
    EMBEDDING,
    LOGITS,
    SCORES,
    ClassifierFacts,
    EncoderFacts,
    shorten,
)
from attention_serving.artifact.golden import GoldenCase
from attention_serving.artifact.manifest import (
    BATCH_AXIS,
    BLOCK_ROWS,
    KEY_LENGTHS,
    TOKEN_TYPES,
    Cost,
    GraphKind,
)
from attention_serving.export.options import Reference
from attention_serving.export.pair_templates import read_templates
from attention_serving.export.precision import ENCODER_TOLERANCES, INT8_SCORES, Precision
from attention_serving.export.probe import LongCase
from attention_serving.export.reference import compare_pairs, compare_texts
from attention_serving.export.shared_prefix import prefix_signatures, split_cases
from attention_serving.export.signature import QUERY_AXIS, ExportSpec, Signature, tensor
from attention_serving.model.text_encoder import TextClassifier, TextEncoder
from attention_serving.model.text_module import vocabulary_size
from attention_serving.model.text_reranker import CausalReranker

TOKEN_IDS: Final = "token_ids"  # noqa: S105 - the name of an input
# Tensors of a token's width that a layer holds at a time: its input, projections, context and sums. Widths of
# a feed-forward part that it holds, and its usual width.
ROW_TENSORS, INNER_TENSORS, USUAL_INNER = 6, 2, 4
# Lengths of the texts whose operations are counted.
COUNTED: Final = (8, 16, 24)


def encoder_spec(
    encoder: TextEncoder,
    *,
    dimensions: Sequence[int] = (),
    truncates: bool = False,
    reference: Reference | None = None,
) -> ExportSpec:
    """The export of a text encoder, with all its graphs, for `write_artifact`.

    Args:
        encoder: The encoder.
        dimensions: Numbers of elements that embeddings can be shortened to, beside those of the folder.
        truncates: Whether long texts are cut unless a request says otherwise.
        reference: What embeddings of texts are compared with. Default: the library of the folder.

    Raises:
        ExportError: The tokenizer that would be served gives a text other ids than the library.
        ValueError: A number of dimensions is not below the width of an embedding.
    """
    texts, reference_name = compare_texts(encoder, reference)
    library, config = encoder.library, encoder.model.config
    ids = torch.zeros(1, COUNTED[0], dtype=torch.int64)
    with torch.inference_mode():
        embedding, rows, _ = encoder(ids, return_tokens=encoder.has_tokens)
    width, family = config.hidden_size if rows is None else rows.shape[-1], config.model_type
    prompts = {} if library is None or not any(library.prompts.values()) else dict(library.prompts)
    layers, heads = encoder.heads
    normalised = bool(torch.isclose(embedding.norm(), torch.ones(())))
    facts = EncoderFacts(
        family=family,
        layers=layers or config.num_hidden_layers,
        width=width,
        embedding_width=embedding.shape[1],
        row_elements=_row_elements(config, width),
        pooling=encoder.pooling,
        normalised=normalised,
        dimensions=_dimensions(encoder, embedding.shape[1], dimensions),
        prompts=prompts,
        default_prompt=(library.default_prompt_name or "") if prompts else "",
        truncates=truncates,
        truncation_side=encoder.reader.truncation_side,
    )
    return ExportSpec(
        module=encoder,
        signatures=tuple(_signatures(encoder, facts)),
        description=(
            f"{family} text encoder, {facts.layers} layers of width {width}, "
            f"{' and '.join(encoder.pooling)} pooling{', normalised' if normalised else ''}"
        ),
        identity=_identity(encoder, encoder=facts),
        tolerances=ENCODER_TOLERANCES,
        config={"layers": _patterns(encoder, facts.layers), "dense": len(encoder.after) > 1 + normalised},
        num_heads=heads or getattr(config, "num_attention_heads", 0),
        causal=encoder.is_causal,
        cost=_cost(encoder),
        tokenizer=encoder.tokenizer,
        encoder=facts.model_copy(update={"quantisation_ranges": _quantisation_ranges(texts, facts)}),
        texts=texts,
        reference=reference_name,
    )


def classifier_spec(
    classifier: TextClassifier, *, truncates: bool = False, reference: Reference | None = None
) -> ExportSpec:
    """The export of a text classifier or reranker. Arguments and errors are those of `encoder_spec`."""
    prompts = {} if not any(classifier.library.prompts.values()) else dict(classifier.library.prompts)
    templates = read_templates(classifier, prompts) if isinstance(classifier, CausalReranker) else {}
    config, bound = classifier.model.config, vocabulary_size(classifier.model)
    inputs = [tensor(TOKEN_IDS, "int64", BATCH_AXIS, QUERY_AXIS, exclusive_upper_bound=bound)]
    if classifier.takes_types:
        types = getattr(config, "type_vocab_size", 0) or 1
        inputs.append(tensor(TOKEN_TYPES, "int64", BATCH_AXIS, QUERY_AXIS, exclusive_upper_bound=types))
    names = (SCORES,) if classifier.activation == "identity" else (SCORES, LOGITS)
    outputs = tuple(tensor(name, "float32", BATCH_AXIS, len(classifier.labels)) for name in names)
    graphs = {GraphKind.PLAIN: tuple(inputs)}
    if classifier.supports_padding:
        graphs[GraphKind.LENGTHS] = (*inputs, tensor(KEY_LENGTHS, "int64", BATCH_AXIS))
    facts = ClassifierFacts(
        family=config.model_type,
        labels=classifier.labels,
        activation=classifier.activation,
        truncates=truncates,
        truncation_side=classifier.reader.truncation_side,
        row_elements=_row_elements(config, config.hidden_size),
        prompts=prompts,
        default_prompt=(classifier.library.default_prompt_name or "") if prompts else "",
        templates=templates,
    )
    texts, reference_name = compare_pairs(classifier, facts, reference)
    count, lengths = len(classifier.labels), _max_lengths(classifier)
    signatures = [
        Signature(kind=kind, inputs=tensors, outputs=outputs, least_key_length=1, max_lengths=lengths)
        for kind, tensors in graphs.items()
    ]
    shared_cases: Sequence[LongCase] = ()
    if isinstance(classifier, CausalReranker) and classifier.supports_padding:
        shared_cases = split_cases(classifier, facts, texts)
        signatures += prefix_signatures(signatures[-1], shared_cases)
    return ExportSpec(
        module=classifier,
        signatures=tuple(signatures),
        description=f"{facts.family} text classifier, {count} label{'s' if count > 1 else ''}",
        identity=_identity(classifier, classifier=facts),
        tolerances={**ENCODER_TOLERANCES, Precision.INT8: INT8_SCORES},
        tokenizer=classifier.tokenizer,
        classifier=facts,
        texts=texts,
        long_cases=shared_cases,
        reference=reference_name,
    )


def _identity(module: TextEncoder | TextClassifier, **facts: object) -> dict[str, object]:
    """What a folder says beside the weights, wherever the folder is."""
    config = {name: value for name, value in module.model.config.to_dict().items() if name != "_name_or_path"}
    return {"config": config, "tokenizer": module.tokenizer.to_str(), **facts}


def _row_elements(config: Any, width: int) -> int:
    """Elements that a run holds at a time for each token, of a model with a width of token vectors."""
    inner = getattr(config, "intermediate_size", None) or USUAL_INNER * width
    return int(ROW_TENSORS * width + INNER_TENSORS * inner)


def _max_lengths(module: TextEncoder | TextClassifier) -> dict[str, int]:
    """The largest number of tokens by axis; empty without a limit."""
    return {} if module.max_tokens is None else {QUERY_AXIS: module.max_tokens}


def _dimensions(encoder: TextEncoder, width: int, dimensions: Sequence[int]) -> tuple[int, ...]:
    if wrong := [size for size in dimensions if not 0 < size < width]:
        raise ValueError(f"dimensions={wrong[0]}: must lie in 1..{width - 1}, below the embedding's width")
    configured = getattr(encoder.model.config, "matryoshka_dimensions", None) or ()
    return tuple(sorted({size for size in (*configured, *dimensions) if size < width}))


def _quantisation_ranges(texts: Sequence[GoldenCase], facts: EncoderFacts) -> dict[int, float]:
    """See `EncoderFacts`. Four digits, which do not depend on the machine."""
    if not texts:
        return {}
    rows = np.concatenate([case.outputs[EMBEDDING] for case in texts])
    sizes = (facts.embedding_width, *facts.dimensions)
    cuts = {size: shorten(rows, size, normalises=facts.normalised) for size in sizes}
    return {size: float(f"{np.abs(cut).max():.4g}") for size, cut in cuts.items()}


def _patterns(encoder: TextEncoder, layers: int) -> list[dict[str, Any]]:
    """The rule of each layer, as configurations state windows."""
    config = encoder.model.config
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else ""] * layers
    if not encoder.is_causal and window:
        window += 1  # rows at most so far away on either side; ours counts the row itself
    return [
        {"causal": encoder.is_causal, "window": window if kind.startswith("sliding") else 0} for kind in kinds
    ]


def _cost(encoder: TextEncoder) -> Cost:
    """The operations of a text of T tokens, a T + b T² + c, from those of three lengths."""
    counts = []
    for length in COUNTED:
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            # Attention that returns weights consists of products that are counted.
            encoder(torch.zeros(1, length, dtype=torch.int64), return_weights=any(encoder.heads))
        counts.append(counter.get_total_flops())
    pair, query, _ = np.polyfit(COUNTED, counts, 2)
    return Cost(flops_per_query=round(query), flops_per_key=0, flops_per_pair=max(0, round(pair)))


def _signatures(encoder: TextEncoder, facts: EncoderFacts) -> Iterator[Signature]:
    """The signature of each graph that the encoder has."""
    bound, (layers, heads) = vocabulary_size(encoder.model), encoder.heads
    token_ids = tensor(TOKEN_IDS, "int64", BATCH_AXIS, QUERY_AXIS, exclusive_upper_bound=bound)
    embedding = tensor(EMBEDDING, "float32", BATCH_AXIS, facts.embedding_width)
    tokens = tensor(CONTEXT_VECTORS, "float32", BATCH_AXIS, QUERY_AXIS, facts.width)
    lengths, outputs = tensor(KEY_LENGTHS, "int64", BATCH_AXIS), [embedding]
    graphs = {GraphKind.PLAIN: ([token_ids], outputs)}
    if encoder.supports_padding:
        graphs[GraphKind.LENGTHS] = ([token_ids, lengths], outputs)
    if encoder.has_tokens and heads:
        axes = (BATCH_AXIS, layers, heads, QUERY_AXIS, QUERY_AXIS)
        weights = tensor(ATTENTION_WEIGHTS, "float32", *axes)
        graphs[GraphKind.WEIGHTS] = ([token_ids, lengths], [embedding, tokens, weights])
    if encoder.has_tokens:
        graphs[GraphKind.TOKENS] = ([token_ids, lengths], [embedding, tokens])
    graphs[GraphKind.BLOCKS] = ([token_ids, tensor(BLOCK_ROWS, "int64")], outputs)
    for kind, (inputs, returned) in graphs.items():
        options = {"return_tokens": tokens in returned, "return_weights": kind is GraphKind.WEIGHTS}
        yield Signature(
            kind=kind,
            inputs=tuple(inputs),
            outputs=tuple(returned),
            options=options,
            num_heads=max(heads, 1),
            least_key_length=1,
            max_lengths=_max_lengths(encoder),
        )
