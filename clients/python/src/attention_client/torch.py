"""`RemoteAttention`: the call of torch.nn.MultiheadAttention, answered by an attention server. Needs PyTorch.

Notation: N sequences of a batch, L query rows, S key rows, E, Ek and Ev widths, H heads.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from attention_client._calls.contexts import Context
from attention_client._client import AttentionClient
from attention_client.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)

log = logging.getLogger(__name__)
# Failures of the service. Others are mistakes in the call, which a fallback would hide.
SERVICE_FAILURES = (DeadlineExceededError, InternalError, ResourceExhaustedError, UnavailableError)
UNBATCHED, BATCHED = 2, 3


class RemoteAttention(nn.Module):
    """Takes the place of a torch.nn.MultiheadAttention whose weights an attention server has.

    Export the layer with `--layout torch`. The module has no parameters and computes no gradients; it works
    inside torch.nn.TransformerEncoderLayer and torch.nn.TransformerDecoderLayer. It connects with its first
    call, and copies of it connect by themselves.

    Two differences from the local layer: a row that may attend to nothing has weights of 0 (PyTorch has NaN),
    and dropout does not apply.

    Args:
        target: HOST:PORT, as for `AttentionClient`.
        model: Name of the model.
        version: Version of the model; empty means the highest that is ready.
        batch_first: Whether batches are (N, L, E). Otherwise they are (L, N, E), which is PyTorch's default.
        fallback: Computes instead if gradients are needed, or if the service cannot be reached, is
            overloaded, takes too long or fails. Called like this module. None raises the error instead.
        store_memory: Whether a memory, one sequence that is both key and value, is put on the server as a
            context by its first call. Later calls with the same memory send their query only.
        options: Further arguments of `AttentionClient`, such as `timeout`.

    Raises:
        InvalidArgumentError: The fallback has another order of axes.
    """

    # torch.nn.TransformerEncoderLayer reads them to decide whether it may compute the layer by itself.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        target: str,
        model: str,
        *,
        version: str | int = "",
        batch_first: bool = False,
        fallback: nn.Module | None = None,
        store_memory: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if getattr(fallback, "batch_first", batch_first) is not batch_first:
            raise InvalidArgumentError(f"must have batch_first={batch_first} too", field="fallback")
        self.target = target
        self.model = model
        self.version = version
        self.batch_first = batch_first
        self.fallback = fallback
        self.store_memory = store_memory
        self._options = options
        self._client: AttentionClient | None = None
        # Names of the model's inputs, once they are known.
        self._inputs: frozenset[str] = frozenset()
        # The last memory that was put, and its context.
        self._memory: tuple[Tensor, Context] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state without the connection, so that the module can be copied and pickled."""
        return vars(self) | {"_client": None, "_memory": None}

    def close(self) -> None:
        """Closes the connection. A later call opens a new one."""
        if self._client is not None:
            self._client.close()
            self._client = None
            self._memory = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,  # noqa: FBT001, FBT002 - as in PyTorch
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: FBT001, FBT002
        is_causal: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[Tensor, Tensor | None]:
        """Computes what torch.nn.MultiheadAttention computes with these arguments.

        Args:
            query: (L, E), or (N, L, E) with `batch_first`, or (L, N, E).
            key: (S, Ek), or as a batch. For a model of self-attention, the query itself.
            value: (S, Ev), or as a batch. For a model without a value input, the key itself.
            key_padding_mask: (S,) or (N, S). True, or minus infinity, at keys that are not attended to.
            need_weights: Whether to return the attention weights.
            attn_mask: (L, S) or (N * H, L, S). True, or minus infinity, where a row may not attend to a key.
            average_attn_weights: Whether to return the mean of the weights of all heads.
            is_causal: Says that `attn_mask` is causal. The mask itself is what counts.

        Returns:
            The context in the form of the query, and the weights: (L, S) or (N, L, S) if averaged, otherwise
            (H, L, S) or (N, H, L, S); None without `need_weights`. Type and device are those of the query.

        Raises:
            InvalidArgumentError: A tensor has a wrong shape, a mask has other numbers than 0 and minus
                infinity, or the model takes fewer inputs than there are different tensors.
            RuntimeError: Gradients are needed, and there is no fallback.
            AttentionClientError: The call failed, and the fallback does not apply.
        """
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
            if self.fallback is None:
                raise RuntimeError(
                    "RemoteAttention computes no gradients; call it under torch.inference_mode(), or give it"
                    " a fallback"
                )
        else:
            try:
                context, weights = self._ask(query, key, value, key_padding_mask, attn_mask, need_weights)
            except SERVICE_FAILURES as error:
                if self.fallback is None:
                    raise
                log.warning("%s: computed by the fallback instead: %s", self.model, error)
            else:
                if weights is not None and average_attn_weights:
                    weights = weights.mean(dim=-3)
                return context, weights
        context, weights = self.fallback(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
        return context, weights

    def _ask(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        need_weights: bool,  # noqa: FBT001
    ) -> tuple[Tensor, Tensor | None]:
        """The context in the form of the query, and the weights of each head."""
        if query.dim() not in (UNBATCHED, BATCHED) or not query.dim() == key.dim() == value.dim():
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
            raise InvalidArgumentError(
                f"query, key and value must be all 2-D or all 3-D, not {shapes}", field="query"
            )
        is_transposed = query.dim() == BATCHED and not self.batch_first
        client = self._connect()
        keys = key.transpose(0, 1) if is_transposed else key
        context = None
        if self.store_memory and key is value and key is not query and keys.shape[:-2].numel() == 1:
            context = self._context(client, keys.reshape(keys.shape[-2:]))
        inputs = [query] if context else [query, *self._key_and_value(query, key, value)]
        rows = [tensor.transpose(0, 1) if is_transposed else tensor for tensor in inputs]
        mask = may_attend(rows[0], keys, key_padding_mask, attn_mask)
        result = client.attend(
            self.model,
            *map(_on_host, rows),
            mask=None if mask is None else mask.cpu().numpy(),
            context=context,
            return_weights=need_weights,
            version=self.version,
        )
        vectors = torch.from_numpy(result.context_vectors).to(query)  # (N, L, E)
        weights = result.attention_weights
        return (
            vectors.transpose(0, 1) if is_transposed else vectors,
            None if weights is None else torch.from_numpy(weights).to(query),
        )

    def _connect(self) -> AttentionClient:
        if self._client is None:
            self._client = AttentionClient(self.target, **self._options)
        if not self._inputs:
            info = self._client.model(self.model, version=self.version)
            self._inputs = frozenset(tensor.name for tensor in info.inputs)
        return self._client

    def _context(self, client: AttentionClient, memory: Tensor) -> Context:
        """The context of a memory (S, E), which is put unless it is the last one that was."""
        if self._memory is None or not _same(self._memory[0], memory):
            rows = [_on_host(memory)] * (2 if "value" in self._inputs else 1)
            context = client.context(self.model, *rows, version=self.version)
            self._memory = memory.detach().clone(), context
        return self._memory[1]

    def _key_and_value(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """The key and the value, if the model takes them; if not, they must be the query and the key."""
        reasons = {
            "key": (key, query, "the query, because the model computes self-attention"),
            "value": (value, key, "the key, because the model has no value input"),
        }
        for name, (tensor, other, reason) in reasons.items():
            if name not in self._inputs and tensor is not other and not _same(tensor, other):
                raise InvalidArgumentError(f"must be {reason}", field=name)
        return [tensor for name, (tensor, _, _) in reasons.items() if name in self._inputs]


def may_attend(
    query: Tensor, key: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
) -> Tensor | None:
    """PyTorch's two masks as one of `AttentionClient.attend`, where True means "may attend".

    Args:
        query: (L, E) or (N, L, E).
        key: (S, Ek) or (N, S, Ek).
        key_padding_mask: (S,) or (N, S).
        attn_mask: (L, S) or (N * H, L, S).

    Returns:
        (S,), (L, S) or (H, L, S), with the axis N before it for a batch; None without a mask.

    Raises:
        InvalidArgumentError: A mask has another shape, or other numbers than 0 and minus infinity.
    """
    batch, pair = query.shape[:-2], (query.shape[-2], key.shape[-2])
    keys = pairs = None
    if key_padding_mask is not None:
        keys = _flags("key_padding_mask", key_padding_mask)
        _check_shape("key_padding_mask", keys, (*batch, pair[1]))
    if attn_mask is not None:
        pairs = _flags("attn_mask", attn_mask)
        if pairs.dim() == BATCHED:
            sequences = batch[0] if batch else 1
            heads = max(1, len(pairs) // max(1, sequences))
            _check_shape("attn_mask", pairs, (sequences * heads, *pair))
            pairs = pairs.reshape(*batch, heads, *pair)
        else:
            _check_shape("attn_mask", pairs, pair)
            pairs = pairs.expand(*batch, *pair)
    if keys is None or pairs is None:
        return pairs if keys is None else keys
    return pairs & keys.reshape(*batch, *([1] * (pairs.dim() - len(batch) - 1)), pair[1])


def _flags(name: str, mask: Tensor) -> Tensor:
    """A mask of PyTorch as booleans, True = may attend."""
    if mask.dtype == torch.bool:
        return ~mask
    kept, dropped = mask == 0, mask == float("-inf")
    if not mask.is_floating_point() or not bool((kept | dropped).all()):
        raise InvalidArgumentError("must hold booleans, or numbers that are 0 or minus infinity", field=name)
    return kept


def _check_shape(name: str, mask: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(mask.shape) != expected:
        raise InvalidArgumentError(f"has the shape {tuple(mask.shape)}; expected {expected}", field=name)


def _same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.device == other.device and torch.equal(tensor, other)


def _on_host(tensor: Tensor) -> Any:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy()
