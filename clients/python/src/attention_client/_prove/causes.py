"""Likely causes of differences: a table of changes, each computed with the library and compared with the server.

Notation: n items, d elements of a row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from attention_client._prove.library import Item, Library, Settings
from attention_client._values import Array

# A cause explains rows if the mean distance with it is at most this part of that without it.
MUCH: Final = 1 / 3
MOST_CAUSES: Final = 3
# How many items are computed for each cause: those that differ most, and some of the rest.
WORST, REST = 16, 8
LENGTHS: Final = (128, 256, 384, 512, 1024, 2048)
# How many lengths are tried one by one.
SEARCHED: Final = 512
POOLINGS: Final = ("cls", "mean", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
# Rounding errors of two implementations have the same size, but are not equal.
MEAN_ROUNDING, MOST_ROUNDING = 3, 6
MOST_DECIMALS: Final = 7
QUANTISED_COSINE: Final = 0.9
Batches = Sequence[Sequence[Item]]


@dataclass(frozen=True)
class Cause:
    """A likely cause: its name, what it means, and what the library computes with it."""

    name: str
    text: str
    settings: Settings = field(default_factory=dict, compare=False)


@dataclass
class Explanation:
    """The causes, and what the library computes with all of them: settings and rows (n, d)."""

    causes: list[Cause]
    settings: Settings
    rows: Array


def within(rows: Array, reference: Array, tolerance: float) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Whether each row equals the reference: |difference| <= tolerance + 2 x tolerance x |reference|."""
    equal: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.all(
        np.abs(rows - reference) <= tolerance * (1 + 2 * np.abs(reference)), axis=1
    )
    return equal


def cosines(rows: Array, reference: Array) -> Array:
    """The cosine of each row and its reference."""
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(reference, axis=1)
    result: Array = (rows * reference).sum(axis=1) / np.maximum(lengths, 1e-12)
    return result


def differences(library: Library) -> Iterator[Cause]:
    """What servers are known to do otherwise, with items one by one."""
    if library.scores:
        for name in {"Identity", "Sigmoid"} - {library.activation}:
            title = (
                "no activation: scores are logits"
                if name == "Identity"
                else "an activation that the model lacks: sigmoid"
            )
            yield Cause(title, f"The folder states {library.activation}.", {"activation": name})
        yield Cause(
            "query and text swapped", "The text is the first of each pair.", {"item": lambda item: item[::-1]}
        )
        types = {"overwrite": ("Transformer", "token_type_ids", 0)}
        yield Cause("token types missing", "All tokens have the type of the query.", types)
    for mode in POOLINGS if library.pooling else ():
        if mode != library.pooling:
            yield Cause(
                f"pooling: {mode} in place of {library.pooling}", "1_Pooling is not read.", {"pooling": mode}
            )
    if not library.scores:
        title = "no normalisation" if library.normalised else "normalisation that the model lacks"
        yield Cause(title, "Only the lengths of vectors differ.", {"normalised": not library.normalised})
    for name, text in {"": "", **library.prompts}.items():
        if text != library.prompt:
            title = f"prompt {name!r}: {text!r}" if text else "prompt missing"
            yield Cause(title, f"The default prompt of the folder is {library.prompt!r}.", {"prompt": text})
    yield Cause(
        "special tokens missing", "Texts have no [CLS], [SEP] or their like.", {"add_special_tokens": False}
    )
    lower: Settings = {"item": lambda item: (item[0].lower(), item[1].lower())}
    yield Cause("texts in lower case", "The tokenizer of the folder keeps upper case.", lower)
    yield Cause(
        "normaliser of the tokenizer missing", "Case and accents stay as they are.", {"normalizer": None}
    )
    yield Cause(
        "long texts are cut at their beginning", "The folder cuts their end.", {"truncation_side": "left"}
    )


# What servers are known to do otherwise with items that run together.
TOGETHER: Final = (
    Cause("padding on the wrong side", "Positions shift in a batch.", {"padding_side": "left"}),
    Cause(
        "padding without a mask",
        "Tokens attend to padding.",
        {"overwrite": ("Transformer", "attention_mask", 1)},
    ),
    Cause(
        "padding is pooled", "Vectors of padding are pooled.", {"overwrite": ("Pooling", "attention_mask", 1)}
    ),
)


class CauseSearch:
    """Explains rows by causes, each computed with the library."""

    def __init__(self, library: Library, tolerance: float, counts: dict[Item, int]) -> None:
        self.library, self.tolerance, self.counts = library, tolerance, counts

    def explain(
        self, rows: Array, batches: Batches, settings: Settings, causes: Sequence[Cause] | None
    ) -> Explanation:
        """The causes that explain rows, the most likely first.

        Args:
            rows: What the server answered, (n, d), in the order of the batches.
            batches: The items that run together.
            settings: What is known already.
            causes: Those that may be; None for those of single items.
        """
        result = Explanation([], settings, self.library.compute(batches, settings))
        while len(result.causes) < MOST_CAUSES and not within(rows, result.rows, self.tolerance).all():
            table = (
                [*differences(self.library), *self._truncations(rows, batches, result)]
                if causes is None
                else causes
            )
            before = _distance(rows, result.rows)
            best: tuple[float, Explanation] | None = None
            for cause in table:
                merged = {**result.settings, **cause.settings}
                try:
                    computed = self.library.compute(batches, merged)
                except Exception:  # noqa: BLE001, S112 - the library raises many types where a change is impossible
                    continue
                distance = _distance(rows, computed)
                if distance <= MUCH * before and (best is None or distance < best[0]):
                    best = distance, Explanation([*result.causes, cause], merged, computed)
            if best is None:
                break
            result = best[1]
        return result

    def explain_rest(self, rows: Array, batches: Batches, explanation: Explanation) -> list[Cause]:
        """What else explains rows: rounding, by its size, or nothing that is known."""
        computed, tolerance = explanation.rows, self.tolerance
        if within(rows, computed, tolerance).all():
            return []
        distances, angles = _distances(rows, computed), cosines(rows, computed)
        if np.array_equal(rows, np.rint(rows)) and angles.min() > QUANTISED_COSINE:
            return [Cause("integers: quantised output", "Embeddings are integers of 8 bits or fewer.")]
        for decimals in range(1, MOST_DECIMALS):
            is_rounded = np.abs(rows - rows.round(decimals)).max() < 1e-9  # noqa: PLR2004
            if is_rounded and np.abs(rows - computed).max() <= 0.51 * 10**-decimals:
                return [
                    Cause(f"output rounded to {decimals} decimals", "Differences end where the decimals do.")
                ]
        for precision in ("float16", "bfloat16"):
            rounding = _distances(
                self.library.compute(batches, {**explanation.settings, "precision": precision}), computed
            )
            if (
                distances.mean() <= MEAN_ROUNDING * rounding.mean()
                and distances.max() <= MOST_ROUNDING * rounding.max()
            ):
                return [
                    Cause(
                        f"lower precision: {precision}", "Differences have the size of its rounding errors."
                    )
                ]
        if explanation.causes:
            return [Cause("a further difference", "The causes above do not explain all of it.")]
        if not self.library.scores and angles.min() > QUANTISED_COSINE:
            return [Cause("8-bit weights", "Only the size of differences is known: cosines above 0.9.")]
        return [
            Cause(
                "another model, or a cause that this command does not know", "No change explains the answers."
            )
        ]

    def _truncations(self, rows: Array, batches: Batches, result: Explanation) -> Iterator[Cause]:
        """The length to which texts are cut, if those that differ are the longest ones."""
        items = [item for batch in batches for item in batch]
        equal = within(rows, result.rows, self.tolerance)
        lengths = [self.counts[item] for item in items]
        short = max((length for length, fits in zip(lengths, equal, strict=True) if fits), default=0)
        differing = [index for index, fits in enumerate(equal) if not fits]
        if not short or short >= min(lengths[index] for index in differing):
            return
        index = max(differing, key=lambda index: lengths[index])
        most = self.library.max_tokens or lengths[index]
        candidates = {*LENGTHS, most + 1, most + 2, lengths[index]}
        if (end := min(lengths[index] for index in differing)) - short <= SEARCHED:
            candidates |= {*range(short, end)}
        distances: dict[int, float] = {}
        for length in sorted(length for length in candidates if short <= length <= lengths[index]):
            try:
                row = self.library.compute([[items[index]]], {**result.settings, "max_length": length})
            except (IndexError, RuntimeError):  # more positions than the model has
                break
            distances[length] = _distance(rows[[index]], row)
        if distances:
            length = min(distances, key=lambda length: distances[length])
            text = f"The folder states {self.library.max_tokens}."
            yield Cause(f"truncation at {length} tokens", text, {"max_length": length})


def choose_items(rows: Array, reference: Array) -> list[int]:
    """The indices of the items that causes are computed for."""
    order = np.argsort(-_distances(rows, reference), kind="stable")
    rest = order[WORST:]
    return sorted(map(int, [*order[:WORST], *rest[:: max(1, len(rest) // REST)]]))


def _distances(rows: Array, reference: Array) -> Array:
    lengths = np.maximum(np.linalg.norm(reference, axis=1), 1e-6)
    result: Array = np.minimum(np.linalg.norm(rows - reference, axis=1) / lengths, 2.0)
    return result


def _distance(rows: Array, reference: Array) -> float:
    return float(_distances(rows, reference).mean())
