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
    SPARSE_EMBEDDING,
    TOKEN_WEIGHTS,
    ClassifierFacts,
    EncoderFacts,
    LateInteractionFacts,
    QueryFacts,
    SparseFacts,
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
from attention_serving.model.text_heads import expansion_token
from attention_serving.model.text_module import ENDLESS, vocabulary_size
from attention_serving.model.text_reranker import CausalReranker

TOKEN_IDS: Final = "token_ids"  # noqa: S105 - the name of an input
# Tensors of a token's width that a layer holds at a time: its input, projections, context and sums. Widths of
# a feed-forward part that it holds, and its usual width. Tensors of logits.
ROW_TENSORS, INNER_TENSORS, USUAL_INNER, LOGIT_TENSORS = 6, 2, 4, 2
KINDS: Final = ("query", "document")
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
        ValueError: A number of dimensions is not below the width of an embedding, or there are none.
    """
    library, config = encoder.library, encoder.model.config
    ids = torch.zeros(1, COUNTED[0], dtype=torch.int64)
    is_dense = encoder.head == "dense"
    if dimensions and not is_dense:
        raise ValueError(f"dimensions={dimensions[0]}: the folder has no dense embeddings to shorten")
    with torch.inference_mode():
        result, rows, *_ = encoder(ids, return_tokens=encoder.has_tokens)
    if encoder.head == "tokens":
        rows = result
    logits = result.shape[1] if encoder.head == "sparse" and not encoder.has_tokens else 0
    prompts = {} if library is None or not any(library.prompts.values()) else dict(library.prompts)
    layers, heads = encoder.heads
    normalised = is_dense and bool(torch.isclose(result.norm(), torch.ones(())))
    facts = EncoderFacts(
        family=config.model_type,
        layers=layers or config.num_hidden_layers,
        width=config.hidden_size if rows is None else rows.shape[-1],
        embedding_width=result.shape[1] if is_dense else 0,
        row_elements=_row_elements(config) + LOGIT_TENSORS * logits,
        pooling=encoder.pooling,
        normalised=normalised,
        dimensions=_dimensions(encoder, result.shape[1], dimensions) if is_dense else (),
        prompts=prompts,
        default_prompt=(library.default_prompt_name or "") if prompts else "",
        truncates=truncates,
        truncation_side=encoder.reader.truncation_side,
        token_limits={
            kind: limit
            for kind, limit in encoder.token_limits.items()
            if limit < (encoder.max_tokens or ENDLESS)
        },
        **_head_facts(encoder, result.shape[-1]),
    )
    texts, reference_name = compare_texts(encoder, facts, reference)
    return ExportSpec(
        module=encoder,
        signatures=tuple(_signatures(encoder, facts)),
        description=_describe(facts),
        identity=_identity(encoder, encoder=facts),
        tolerances=ENCODER_TOLERANCES,
        config={
            "layers": _patterns(encoder, facts.layers),
            "dense": is_dense and len(encoder.after) > 1 + normalised,
        },
        num_heads=heads or getattr(config, "num_attention_heads", 0),
        causal=encoder.is_causal,
        cost=_cost(encoder),
        tokenizer=encoder.tokenizer,
        encoder=facts.model_copy(update={"quantisation_ranges": _quantisation_ranges(texts, facts)}),
        texts=texts,
        reference=reference_name,
    )


def _describe(facts: EncoderFacts) -> str:
    """One line about an encoder, for people."""
    heads = ["sparse"] * (facts.sparse is not None) + ["multi-vector"] * (facts.late_interaction is not None)
    line = f"{facts.layers} layers of width {facts.width}"
    if not facts.embedding_width:
        return f"{facts.family} {heads[0]} encoder, {line}"
    pooling = f"{' and '.join(facts.pooling)} pooling{', normalised' if facts.normalised else ''}"
    further = f", {' and '.join(heads)} heads" if heads else ""
    return f"{facts.family} text encoder, {line}, {pooling}{further}"


def _head_facts(encoder: TextEncoder, width: int) -> dict[str, Any]:
    """What is stated of heads beside a dense one, of which the encoder's head has a width, and of queries."""
    facts, library = dict[str, Any](), encoder.library
    if encoder.token_heads:
        reader = encoder.reader
        special = {reader.cls_token_id, reader.eos_token_id, reader.pad_token_id, reader.unk_token_id}
        hidden = tuple(sorted(special - {None}))
        facts["sparse"] = SparseFacts(width=encoder.token_bound, hidden_ids=hidden)
        facts["late_interaction"] = LateInteractionFacts(similarity="meanmaxsim", skips_first=True)
    elif encoder.head == "sparse":
        facts["sparse"] = SparseFacts(width=width, max_active=library.max_active_dims or 0)
        facts["query"] = QueryFacts(adds_special=encoder.query_weights is None)
    elif encoder.head == "tokens":
        mask = next(module for module in library if hasattr(module, "skiplist_tasks"))
        skipped = () if mask._skiplist_ids is None else sorted({*mask._skiplist_ids.tolist()})
        facts["late_interaction"] = LateInteractionFacts(
            similarity=library.similarity_fn_name,
            skipped_ids=tuple(skipped),
            skipped_kinds=tuple(kind for kind in KINDS if kind in mask.skiplist_tasks),
        )
        if encoder.expanded_length:
            hides = encoder.hidden_token is not None
            token = encoder.token_bound - 1 if hides else expansion_token(library[0])
            facts["query"] = QueryFacts(expansion_id=token, expanded_length=encoder.expanded_length)
    return facts


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
        row_elements=_row_elements(config),
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


def _row_elements(config: Any) -> int:
    """Elements that a run of a model holds at a time for each token."""
    width = config.hidden_size
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
    if not texts or not facts.embedding_width:
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
    is_dense, (layers, heads) = encoder.head == "dense", encoder.heads
    token_ids = tensor(TOKEN_IDS, "int64", BATCH_AXIS, QUERY_AXIS, exclusive_upper_bound=encoder.token_bound)
    tokens = tensor(CONTEXT_VECTORS, "float32", BATCH_AXIS, QUERY_AXIS, facts.width)
    token_weights = tensor(TOKEN_WEIGHTS, "float32", BATCH_AXIS, QUERY_AXIS)
    result = tokens
    if is_dense:
        result = tensor(EMBEDDING, "float32", BATCH_AXIS, facts.embedding_width)
    elif facts.sparse is not None:
        result = tensor(SPARSE_EMBEDDING, "float32", BATCH_AXIS, facts.sparse.width)
    lengths, outputs = tensor(KEY_LENGTHS, "int64", BATCH_AXIS), [result]
    graphs = {GraphKind.PLAIN: ([token_ids], outputs)}
    if encoder.supports_padding:
        graphs[GraphKind.LENGTHS] = ([token_ids, lengths], outputs)
    if is_dense and encoder.has_tokens and heads:
        axes = (BATCH_AXIS, layers, heads, QUERY_AXIS, QUERY_AXIS)
        weights = tensor(ATTENTION_WEIGHTS, "float32", *axes)
        graphs[GraphKind.WEIGHTS] = ([token_ids, lengths], [result, tokens, weights])
    if is_dense and encoder.has_tokens:
        of_tokens = [tokens, token_weights] if encoder.token_heads else [tokens]
        graphs[GraphKind.TOKENS] = ([token_ids, lengths], [result, *of_tokens])
    graphs[GraphKind.BLOCKS] = ([token_ids, tensor(BLOCK_ROWS, "int64")], outputs)
    if encoder.query_weights is not None:
        bound = len(encoder.query_weights)
        query_ids = tensor(TOKEN_IDS, "int64", BATCH_AXIS, QUERY_AXIS, exclusive_upper_bound=bound)
        graphs[GraphKind.QUERY] = ([query_ids], [token_weights])
    for kind, (inputs, returned) in graphs.items():
        is_query = kind is GraphKind.QUERY
        options = {"return_tokens": tokens in returned[1:], "return_weights": kind is GraphKind.WEIGHTS}
        yield Signature(
            kind=kind,
            inputs=tuple(inputs),
            outputs=tuple(returned),
            options={} if is_query else options,
            method="weigh" if is_query else "forward",
            num_heads=max(heads, 1),
            least_key_length=1,
            max_lengths=_max_lengths(encoder),
        )
