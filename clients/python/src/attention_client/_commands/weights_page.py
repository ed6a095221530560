"""Writes a page that explores attention weights: one HTML file that loads nothing.

_explorer.html is the page, built from clients/explorer of the repository; servers have it at /explore.

Notation: L layers, H heads, Tq query rows, Tk key rows.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageAnswer:
    """The weights that one model computed.

    Attributes:
        model: Name of the model.
        version: Its version.
        subject: The text, or what stands for it.
        queries: A label for each of the Tq query rows.
        keys: A label for each of the Tk key rows.
        weights: float32 (L, H, Tq, Tk).
        patterns: The model's own rule for each layer.
        mask: The mask of the request, true if a row may attend: (Tk,), (Tq, Tk) or (H, Tq, Tk); None if it
            has none.
    """

    model: str
    version: str
    subject: str
    queries: Sequence[str]
    keys: Sequence[str]
    weights: FloatArray
    patterns: Sequence[PatternInfo]
    mask: NDArray[Any] | None = None


def save(answers: Sequence[PageAnswer], path: Path) -> int:
    """Writes the page of one answer, or of two and their difference, and returns its size in bytes.

    Raises:
        OSError: The file cannot be written.
        ValueError: An answer has too many rows or weights.
    """
    for answer in answers:
        _check_size(answer)
    # In a script element, only "<" could be taken for markup.
    data = json.dumps([_embedded(answer) for answer in answers], ensure_ascii=False).replace("<", "\\u003c")
    page = files("attention_client").joinpath("_explorer.html").read_text(encoding="utf-8")
    filled = page.replace(_REQUESTS, "", 1).replace(_PLACE, _PLACE.replace("></", f">{data}</"), 1)
    return path.write_bytes(filled.encode(errors="replace"))


def _check_size(answer: PageAnswer) -> None:
    rows = max(answer.weights.shape[-2:])
    if rows > MAX_ROWS or answer.weights.size > MAX_WEIGHTS:
        raise ValueError(
            f"--html: {rows} rows and {answer.weights.size} weights; a page draws at most {MAX_ROWS} rows "
            f"and {MAX_WEIGHTS} weights: shorten the input"
        )


def _embedded(answer: PageAnswer) -> dict[str, Any]:
    layers, heads, *_ = answer.weights.shape
    return {
        "model": answer.model,
        "version": answer.version,
        "subject": answer.subject,
        "queries": list(answer.queries),
        "keys": list(answer.keys),
        "layers": layers,
        "heads": heads,
        "patterns": [asdict(pattern) for pattern in answer.patterns],
        "mask": None if answer.mask is None else _mask(np.asarray(answer.mask, bool)),
        "weights": _base64(np.ascontiguousarray(answer.weights, "<f4")),
    }


def _mask(mask: NDArray[np.bool_]) -> dict[str, Any]:
    return {"shape": list(mask.shape), "bits": _base64(np.packbits(mask, bitorder="little"))}


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()
