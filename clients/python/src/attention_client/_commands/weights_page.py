"""Writes a page that explores attention weights: one HTML file that loads nothing.

_explorer.html is the page, built from clients/explorer of the repository; servers have it at /explore.

Notation: L layers, H heads, Tq query rows, Tk key rows.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_client._models import PatternInfo
from attention_client._values import FloatArray

# Where the page expects the answers. A page that a server serves has none.
_PLACE = '<script type="application/json" id="answers"></script>'
# What the page of a server may ask; a file makes no requests.
_REQUESTS = "connect-src 'self'; "
# More rows make unreadable pictures and slow pages.
MAX_ROWS = 256
MAX_WEIGHTS = 1 << 24


def page_answer(
    *,
    model: str,
    version: str,
    subject: str,
    queries: Sequence[str],
    keys: Sequence[str],
    weights: FloatArray,
    patterns: Sequence[PatternInfo],
    mask: NDArray[Any] | None = None,
) -> dict[str, Any]:
    """The weights that one model computed, as the page reads them.

    Args:
        model: Name of the model.
        version: Its version.
        subject: The text, or what stands for it.
        queries: A label for each of the Tq query rows.
        keys: A label for each of the Tk key rows.
        weights: float32 (L, H, Tq, Tk).
        patterns: The model's own rule for each layer.
        mask: The mask of the request, true if a row may attend: (Tk,), (Tq, Tk) or (H, Tq, Tk); None if it
            has none.

    Raises:
        ValueError: There are too many rows or weights.
    """
    layers, heads, *lengths = weights.shape
    if max(lengths) > MAX_ROWS or weights.size > MAX_WEIGHTS:
        raise ValueError(
            f"--html: {max(lengths)} rows and {weights.size} weights; a page draws at most {MAX_ROWS} rows "
            f"and {MAX_WEIGHTS} weights: shorten the input"
        )
    return {
        "model": model,
        "version": version,
        "subject": subject,
        "queries": list(queries),
        "keys": list(keys),
        "layers": layers,
        "heads": heads,
        "patterns": [asdict(pattern) for pattern in patterns],
        "mask": None if mask is None else _mask(np.asarray(mask, bool)),
        "weights": _base64(np.ascontiguousarray(weights, "<f4")),
    }


def save(answers: Sequence[dict[str, Any]], path: Path) -> int:
    """Writes the page of one answer, or of two and their difference, and returns its size in bytes.

    Raises:
        OSError: The file cannot be written.
    """
    # In a script element, only "<" could be taken for markup.
    data = json.dumps(answers, ensure_ascii=False).replace("<", "\\u003c")
    page = files("attention_client").joinpath("_explorer.html").read_text(encoding="utf-8")
    filled = page.replace(_REQUESTS, "", 1).replace(_PLACE, _PLACE.replace("></", f">{data}</"), 1)
    return path.write_bytes(filled.encode(errors="replace"))


def _mask(mask: NDArray[np.bool_]) -> dict[str, Any]:
    return {"shape": list(mask.shape), "bits": _base64(np.packbits(mask, bitorder="little"))}


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()
