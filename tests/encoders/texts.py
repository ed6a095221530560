"""Texts of mixed lengths and scripts, and what the transformers library computes for them."""

from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tests.support import encoders

# Keyword arguments of `enrich`.
Options = dict[str, Any]
RTOL, ATOL = 1e-3, 1e-4
TEXTS = (
    "Life is short, eat dessert first",
    "a",
    "",
    "Das Leben ist kurz: iß den Nachtisch zuerst!",
    "人生短暂 先吃甜点",
    "\U0001f370",
    "dessert " * 12,
    "Life is short, eat dessert first",
)


@cache
def library_model(name: str) -> encoders.Model:
    """The model of a family."""
    return encoders.make_model(name)


def token_ids(name: str, text: str) -> list[int]:
    """The ids of a text, with special tokens."""
    ids: list[int] = encoders.tokenizer_of(name).encode(text).ids
    return ids


def expected_of(name: str, text: str, *, normalised: bool = False) -> encoders.Expected:
    """What the library computes for a text."""
    return encoders.expected(name, library_model(name), token_ids(name, text), normalised=normalised)


def rows_of(column: pa.ChunkedArray) -> NDArray[np.float32]:
    """The vectors of a column without nulls, (B, d)."""
    return np.stack(column.to_numpy())
