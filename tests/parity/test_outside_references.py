"""Random configurations, served, against references that are not ours: torch's own attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from attention_client import AttentionClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from export.artifact import write_artifact
from export.model_id import ModelId
from model.attention import MultiHeadAttention
from model.config import AttentionConfig
from scripts.local_server import serving
from tests.support.eager import Array, assert_parity
from tests.support.tables import linear_layers

# Each example exports a module and starts a server.
FEW = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Inputs:
    """What one request brings: sequences and, of each, which keys each row may attend to."""

    queries: list[Array]
    keys: list[Array]
    masks: list[Array] | None


@contextmanager
def served(module: MultiHeadAttention) -> Iterator[AttentionClient]:
    """A server of one module."""
    with TemporaryDirectory() as folder:
        write_artifact(module.eval(), ModelId("random"), Path(folder) / "models")
        process = serving(Path(folder) / "models", Path(folder) / "log")
        with process as server, AttentionClient(server.target) as client:
            yield client


def random_inputs(config: AttentionConfig, lengths: list[tuple[int, int]], *, masked: bool) -> Inputs:
    rng = np.random.default_rng(len(lengths))
    queries = [rng.standard_normal((tq, config.d_query), np.float32) for tq, _ in lengths]
    keys = (
        [rng.standard_normal((tk, config.d_key), np.float32) for _, tk in lengths]
        if config.cross
        else queries
    )
    shapes = [(config.num_heads, len(query), len(key)) for query, key in zip(queries, keys, strict=True)]
    return Inputs(queries, keys, [rng.random(shape) < 0.7 for shape in shapes] if masked else None)


def ask(client: AttentionClient, config: AttentionConfig, inputs: Inputs) -> list[Array]:
    keys = [inputs.keys] if config.cross else []
    return client.attend("random", inputs.queries, *keys, mask=inputs.masks).context_vectors


def allowed(config: AttentionConfig, inputs: Inputs, index: int) -> Tensor:
    """(H, Tq, Tk) of one sequence, the causal rule included."""
    query_length, key_length = len(inputs.queries[index]), len(inputs.keys[index])
    mask = torch.ones(config.num_heads, query_length, key_length, dtype=torch.bool)
    if inputs.masks is not None:
        mask = mask & torch.from_numpy(inputs.masks[index])
    return mask.tril() if config.causal else mask


lengths_of_requests = st.lists(st.tuples(st.integers(1, 17), st.integers(1, 17)), min_size=1, max_size=5)
heads = st.integers(1, 4)
head_widths = st.sampled_from([1, 2, 3, 8, 16])


@FEW
@given(
    heads=heads,
    width=head_widths,
    bias=st.booleans(),
    causal=st.booleans(),
    cross=st.booleans(),
    lengths=lengths_of_requests,
)
def test_multihead_attention_of_torch(
    heads: int, width: int, bias: bool, causal: bool, cross: bool, lengths: list[tuple[int, int]]
) -> None:
    size = heads * width
    config = AttentionConfig(
        d_query=size, num_heads=heads, qkv_bias=bias, out_bias=bias, causal=causal, cross=cross
    )
    module = MultiHeadAttention(config)
    reference = nn.MultiheadAttention(size, heads, bias=bias, batch_first=True).eval()
    copy_weights(module, reference)
    with served(module) as client:
        for masked in (False, True):
            inputs = random_inputs(config, lengths, masked=masked)
            found = ask(client, config, inputs)
            for index, (query, key) in enumerate(zip(inputs.queries, inputs.keys, strict=True)):
                may = allowed(config, inputs, index)
                rows = may.any(dim=-1).all(dim=0)  # the others are NaN in torch's own
                q, k = torch.from_numpy(query)[None], torch.from_numpy(key)[None]
                with torch.inference_mode():
                    context, _ = reference(q, k, k, attn_mask=~may, need_weights=False)
                assert_parity(found[index][rows.numpy()], context[0][rows].numpy())


def copy_weights(module: MultiHeadAttention, reference: nn.MultiheadAttention) -> None:
    layers = linear_layers(module)
    assert module.output is not None
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([layer.weight for layer in layers]))
        reference.out_proj.weight.copy_(module.output.weight)
        if reference.in_proj_bias is not None:
            reference.in_proj_bias.copy_(torch.cat([layer.bias for layer in layers]))
            reference.out_proj.bias.copy_(module.output.bias)


@FEW
@given(
    heads=heads,
    d_k=head_widths,
    d_v=head_widths,
    causal=st.booleans(),
    scale=st.sampled_from([0.125, 0.5, 1.0]),
    lengths=lengths_of_requests,
)
def test_scaled_dot_product_attention_of_torch(
    heads: int, d_k: int, d_v: int, causal: bool, scale: float, lengths: list[tuple[int, int]]
) -> None:
    config = AttentionConfig(
        d_query=heads * d_k,
        d_value=heads * d_v,
        num_heads=heads,
        cross=True,
        separate_value=True,
        projections="none",
        out_proj=False,
        causal=causal,
        scale=scale,
    )
    with served(MultiHeadAttention(config)) as client:
        for masked in (False, True):
            inputs = random_inputs(config, lengths, masked=masked)
            rng = np.random.default_rng(9)
            values = [rng.standard_normal((len(key), config.d_value), np.float32) for key in inputs.keys]
            found = client.attend("random", inputs.queries, inputs.keys, values, mask=inputs.masks)
            for index, value in enumerate(values):
                q, k, v = (
                    torch.from_numpy(rows).view(len(rows), heads, -1).transpose(0, 1)  # (H, T, d)
                    for rows in (inputs.queries[index], inputs.keys[index], value)
                )
                context = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=allowed(config, inputs, index), scale=scale
                )
                assert_parity(found.context_vectors[index], context.transpose(0, 1).flatten(1).numpy())
