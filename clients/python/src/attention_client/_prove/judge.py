"""Compares a server with the library, text by text and in batches, and names likely causes of differences.

Notation: N texts or pairs, d elements of an embedding, or one for each label of a score.
"""

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from json import loads
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attention_client import AttentionClientError, InvalidArgumentError
from attention_client._prove.library import Item, Library, Settings
from attention_client._prove.servers import Server, ask
from attention_client._values import Array

TEXTS: Final[list[str]] = loads(files("attention_client").joinpath("_reference_texts.json").read_bytes())
WORDS: Final = "the of and to in is it you that he was for on are with as at be this from I have or by one "
TEXT_COUNT, QUERIES, PROMPTED, EXAMPLES, EXCERPT = 64, 4, 8, 3, 60
# The texts with lengths around the largest number of tokens.
GRID: Final = range(TEXT_COUNT - 4, TEXT_COUNT)
# Lengths around the model's own are judged up to this one, so that the library answers in time.
LONGEST: Final = 512
# Texts in a request, and whether they are shuffled. Servers take 32 or more.
BATCHES: Final = ((16, False), (7, True))
# A cause explains rows if their distance from the library's is at most this part of that without the cause.
MUCH, MOST_CAUSES, PAIRED, NEAR = 1 / 3, 3, 3, 0.003
# A cause is computed for the longest texts, as many of those that differ most, and each n-th of the rest.
WORST, STEP = 8, 9
# Rounding errors of two implementations have the same size, and are not equal.
ROUNDING: Final = 4
LENGTHS: Final = (128, 256, 384, 512, 1024, 2048)
POOLINGS: Final = ("cls", "mean", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
TOGETHER: Final[Mapping[str, Settings]] = {
    "a batch is padded on the wrong side": {"padding_side": "left"},
    "a batch is padded without a mask": {"overwrite": ("Transformer", "attention_mask", 1)},
    "padding is pooled": {"overwrite": ("Pooling", "attention_mask", 1)},
    "padding has vectors": {"overwrite": ("MultiVectorMask", "attention_mask", 1)},
}
KINDS: Final[dict[str, Settings]] = {
    "queries are computed as documents": {"item": lambda item: ("document", item[1])},
    "documents are computed as queries": {"item": lambda item: ("query", item[1])},
    "the kind of texts is ignored": {"item": lambda item: ("", item[1])},
}


def differences(library: Library) -> dict[str, Settings]:
    """What servers are known to do otherwise."""
    prompts = {f"the prompt {name!r} is put before texts": text for name, text in library.prompts.items()}
    changes: dict[str, Settings] = {
        **{
            name: {"prompt": text}
            for name, text in {"the prompt is missing": "", **prompts}.items()
            if prompts
        },
        "special tokens are missing": {"add_special_tokens": False},
        "texts are in lower case": {"item": lambda item: (item[0].lower(), item[1].lower())},
        "the tokenizer's normaliser is missing": {"normalizer": None},
        "long texts are cut at their beginning": {"truncation_side": "left"},
    }
    if library.scores:
        return changes | {
            "scores are logits, without the activation": {"activation": "Identity"},
            "scores are those after a sigmoid": {"activation": "Sigmoid"},
            "query and text are swapped": {"item": lambda item: item[::-1]},
            "token types are missing": {"overwrite": ("Transformer", "token_type_ids", 0)},
        }
    if library.output == "sparse":
        splade = library.modules.get("SpladePooling")
        mode, other = ("sum", "max") if getattr(splade, "pooling_strategy", "") == "sum" else ("max", "sum")
        return {
            f"pooling is {other} rather than {mode}": {"SpladePooling.pooling_strategy": other},
            "one of two logarithms is missing": {"SpladePooling.activation_function": "relu"},
            "weights are logarithms of the library's": {"SpladePooling.activation_function": "log1p_relu"},
            "weights are without the logarithm": {"after": np.expm1},
            **KINDS,
            **changes,
        }
    if library.output == "token_vectors":
        return {
            "token vectors are not normalised": {"normalised": False},
            "the skip list is not applied": {"MultiVectorMask._skiplist_ids": None},
            "query expansion is missing": {"Transformer.query_expansion": None},
            **KINDS,
            **changes,
        }
    modes = POOLINGS if library.pooling else ()
    normalisation = f"embeddings are{' not' * library.normalised} normalised"
    pooling = {
        f"pooling is {mode} rather than {library.pooling}": {"Pooling.pooling_mode": mode} for mode in modes
    }
    return pooling | changes | {normalisation: {"normalised": not library.normalised}}


class Judge:
    """Judges a server by the library: `report` is the result.

    Raises:
        AttentionClientError: The server cannot be judged: it cannot be reached, or refuses every text.
    """

    def __init__(self, server: Server, library: Library, tolerance: float) -> None:
        server.choose_model()
        self.server, self.library, self.tolerance = server, library, tolerance
        self.items = make_items(library, server.kinds)
        self.ids = [library.ids_of(item) for item in self.items]
        self.tokens: dict[int, Any] = {}
        self.refusals: dict[int, str] = {}
        self.refused_batches: dict[str, str] = {}
        self.causes: list[str] = []
        singles = [[index] for index in range(len(self.items))]
        alone, again = self._send(singles), self._send(singles)
        reference = library.compute([[item] for item in self.items])
        if (width := alone.shape[1]) != reference.shape[1]:
            self.causes.append(f"rows have {width} elements rather than {reference.shape[1]}")
        settings: Settings = {"dimensions": width}
        reference = library.cut(reference, settings)
        alone, again = (rows[:, : reference.shape[1]] for rows in (alone, again))
        judged = [index for index in range(len(alone)) if index not in self.refusals]
        equal = self._fits(alone, reference)
        figures = self._compare(alone[judged], reference[judged])
        figures["largest difference of the second time"] = repeated = float(np.nanmax(np.abs(alone - again)))
        report: dict[str, Any] = {"model": server.model, "library": library.version, "tolerance": tolerance}
        report["alone"] = figures
        order = sorted(judged, key=lambda index: -_distances(alone[[index]], reference[[index]])[0])
        chosen = [[index] for index in sorted({*order[:WORST], *order[WORST::STEP], *GRID} & {*judged})]
        settings, computed = self._explain(alone, chosen, settings, None)
        allowed = tolerance + ROUNDING * self._explain_rest(alone, chosen, settings, computed)
        if repeated > allowed:
            self.causes.append("the same request has another answer the second time")
        for size, is_shuffled in BATCHES:
            groups = self._group(judged, size, is_shuffled=is_shuffled)
            rows = self._send(groups)[:, : reference.shape[1]]
            part = np.isfinite(rows + alone).all(axis=1)
            equal &= ~part | self._fits(rows, reference)
            report[f"in batches of {size}"] = self._compare(rows[part], reference[part])
            self._explain_batches(rows, alone, groups, settings, allowed)
        self._conclude(report, equal, judged)

    def _conclude(self, report: dict[str, Any], equal: NDArray[np.bool_], judged: list[int]) -> None:
        """Adds tokens, lengths, prompts, refusals, causes and the verdict in one line."""
        wrong = [index for index, tokens in self.tokens.items() if not self._has_tokens(index, tokens)]
        report["tokens"] = {"equal": f"{len(self.tokens) - len(wrong)} of {len(self.tokens)}"}
        report["tokens"] |= {
            self._excerpt(index): str(self.tokens[index])[:EXCERPT] for index in wrong[:EXAMPLES]
        }
        results = {index: "equal" if equal[index] else "different" for index in judged}
        report["longest texts"] = {
            f"{len(self.ids[index])} tokens": results.get(index, "refused") for index in GRID
        }
        report["prompts"] = {}
        if not self.causes and not self.library.scores:
            report["prompts"] |= map(self._compare_prompt, self.server.prompts(self.library.prompts))
        report["refused"] = {self._excerpt(index): text for index, text in self.refusals.items()}
        report["refused"] |= self.refused_batches
        if not self.causes and not equal[judged].all():
            self.causes.append("rounding, by more than the tolerance")
        verdict = f"equal: {equal[judged].sum()} of {len(judged)} texts, alone and in batches"
        verdict += f"; {len(self.refusals)} refused" * bool(self.refusals)
        verdict += f"; largest difference {report['alone']['largest difference']:.1e}"
        verdict += f", cosines {report['alone']['cosines']}" if "cosines" in report["alone"] else ""
        if causes := [*dict.fromkeys(self.causes)]:
            verdict = f"not {verdict}; likely cause: {', and '.join(causes)}"
        self.report = report | {"causes": causes, "status": int(bool(causes)), "verdict": verdict}

    def _send(self, groups: Sequence[Sequence[int]]) -> Array:
        """The rows of all texts, (N, d): NaN for those that are refused or in no group."""
        rows: dict[int, Array] = {}
        for group in groups:
            query, texts = self.items[group[0]][0], [self.items[index][1] for index in group]
            try:
                answer = ask(self.server, query, texts)
            except InvalidArgumentError as error:
                if len(group) == 1:
                    self.refusals[group[0]] = str(error)
                else:
                    self.refused_batches[f"{len(group)} texts"] = str(error)
                continue
            if not np.isfinite(answer).all() and not self.causes:
                self.causes.append("answers have NaN or infinity")
            rows |= zip(group, np.nan_to_num(answer), strict=True)
            tokens: Any = self.server.tokens
            if len(group) == 1 and self.library.output in ("dense", "sparse"):
                with suppress(AttentionClientError):
                    tokens = self.server.tokenize(texts[0]) or tokens
                self.tokens |= {} if tokens is None else {group[0]: tokens}
        if not rows:
            reasons = [*self.refused_batches.values(), *self.refusals.values()]
            raise AttentionClientError(f"every request is refused: {reasons[0]}")
        missing = np.full_like(next(iter(rows.values())), np.nan)
        return np.stack([rows.get(index, missing) for index in range(len(self.items))])

    def _group(self, indices: list[int], size: int, *, is_shuffled: bool) -> list[list[int]]:
        """Batches of texts that have the same query."""
        queries: dict[str, list[int]] = {}
        for index in random.Random(0).sample(indices, len(indices)) if is_shuffled else indices:  # noqa: S311
            queries.setdefault(self.items[index][0], []).append(index)
        return [part[at : at + size] for part in queries.values() for at in range(0, len(part), size)]

    def _explain(
        self, rows: Array, groups: list[list[int]], settings: Settings, table: Mapping[str, Settings] | None
    ) -> tuple[Settings, Array]:
        """Adds the causes that explain rows; returns the settings of all, and what the library computes.

        A table of None stands for the causes that matter for texts one by one.
        """
        batches = [[self.items[index] for index in group] for group in groups]
        indices = [index for group in groups for index in group]
        computed = self.library.compute(batches, settings)
        while len(self.causes) < MOST_CAUSES and not self._fits(rows[indices], computed).all():
            changes = table or differences(self.library) | self._truncate(rows, indices, settings, computed)
            most = int((rows[indices] != 0).sum(axis=1).max())
            if self.library.output == "sparse" and most < (computed != 0).sum(axis=1).max():
                name = f"only the {most} largest weights are returned"
                changes = {**changes, name: {"max_active_dims": most}}
            best = _distances(rows[indices], computed).mean() * MUCH
            singles: dict[tuple[str, ...], Settings] = {(name,): settings | changes[name] for name in changes}
            ranking = self._rank(rows[indices], batches, singles)
            if ranking and ranking[0][0] > best > NEAR:  # two of them, one of which is among the best
                pairs = {
                    (*names, name): changed | changes[name]
                    for _, names, changed, _ in ranking[:PAIRED]
                    for name in changes
                }
                ranking = self._rank(rows[indices], batches, pairs)
            if not ranking or ranking[0][0] > best:
                break
            _, names, settings, computed = ranking[0]
            self.causes += names
        return settings, computed

    def _rank(
        self, rows: Array, batches: Sequence[Sequence[Item]], table: dict[tuple[str, ...], Settings]
    ) -> list[tuple[float, tuple[str, ...], Settings, Array]]:
        """Causes with distance, settings, and what the library computes with them, the nearest first."""
        ranking = []
        for names, settings in table.items():
            with suppress(Exception):  # the libraries raise many types if a model cannot do it
                computed = self.library.compute(batches, settings)
                ranking.append((float(_distances(rows, computed).mean()), names, settings, computed))
        return sorted(ranking, key=lambda entry: entry[0])

    def _truncate(
        self, rows: Array, indices: list[int], settings: Settings, computed: Array
    ) -> dict[str, Settings]:
        """The number of tokens to which texts are cut, if those that differ are the longest ones."""
        equal = self._fits(rows[indices], computed)
        lengths = np.array([len(self.ids[index]) for index in indices])
        short, end = max(lengths[equal], default=0), min(lengths[~equal])
        index, most = indices[int(np.argmax(lengths * ~equal))], max(lengths[~equal])
        distances: dict[int, float] = {}
        limit = self.library.max_tokens or most
        candidates = {*LENGTHS, limit + 1, limit + 2, most, *range(short, min(end, short + LONGEST))}
        for length in sorted(candidates):
            if 0 < short <= length <= most and short < end:
                with suppress(IndexError, RuntimeError, ValueError):  # more positions than the model has
                    row = self.library.compute([[self.items[index]]], settings | {"max_length": int(length)})
                    distances[int(length)] = _distances(rows[[index]], row)[0]
        if not distances:
            return {}
        length = min(distances, key=distances.__getitem__)
        name = f"texts are cut to {length} tokens rather than {self.library.max_tokens}"
        return {name: {"max_length": length}}

    def _explain_rest(
        self, rows: Array, groups: list[list[int]], settings: Settings, computed: Array
    ) -> float:
        """Adds rounding, by its size, or that there is another cause; returns the largest difference."""
        rows, batches = rows[[group[0] for group in groups]], [[self.items[group[0]]] for group in groups]
        if self._fits(rows, computed).all():
            return 0.0
        distances, largest = _distances(rows, computed), float(np.abs(rows - computed).max())
        cause = "something else" if self.causes else "another model, or something unknown"
        if not self.library.scores and _cosines(rows, computed).min() > 0.9:  # noqa: PLR2004
            cause = "embeddings are integers" if np.array_equal(rows, rows.round()) else "weights have 8 bits"
        ordered = (np.sort(array, axis=1) for array in (rows, computed))
        if self.library.output == "sparse" and self._fits(*ordered).all():
            cause = "token ids are those of another tokenizer"
        for precision in ("bfloat16", "float16"):
            changed = self.library.compute(batches, settings | {"precision": precision})
            rounding = ROUNDING * _distances(changed, computed)
            if distances.mean() <= rounding.mean() and distances.max() <= rounding.max():
                cause = f"precision is {precision}"
        decimals = next((n for n in range(1, 7) if np.allclose(rows, rows.round(n), 0, 1e-9)), 0)
        if decimals and largest < 10**-decimals:
            cause = f"numbers have {decimals} decimals"
        self.causes.append(cause)
        return largest

    def _explain_batches(
        self, rows: Array, alone: Array, groups: list[list[int]], settings: Settings, allowed: float
    ) -> None:
        """Adds the causes of differences between the same texts alone and in batches."""
        unequal = (np.abs(rows - alone) > allowed * (1 + 2 * np.abs(alone))).any(axis=1)  # not if NaN
        moved, count = 0, len(self.causes)
        for group in groups:
            fits = (np.abs(rows[group][:, None] - alone[group]) <= allowed).all(axis=2)
            moved += int((fits.any(axis=1) & ~fits.diagonal()).sum())
        if moved > unequal.sum() / 2:
            self.causes.append("results of a batch are in another order")
        elif unequal.any():
            worst = sorted(groups, key=lambda group: -unequal[group].sum())[:3]
            self._explain(rows, worst, settings, TOGETHER)
            if len(self.causes) == count:
                self.causes.append("texts have other results beside other texts")

    def _compare(self, rows: Array, reference: Array) -> dict[str, Any]:
        equal, largest = self._fits(rows, reference), float(np.abs(rows - reference).max())
        figures: dict[str, Any] = {"equal": f"{equal.sum()} of {len(rows)}", "largest difference": largest}
        if not self.library.scores:
            angles, lengths = _cosines(rows, reference), np.linalg.norm(rows, axis=1)
            figures["cosines"] = f"from {angles.min():.6f}, {angles.mean():.6f} on average"
            figures["lengths of vectors"] = f"{lengths.min():.4g} to {lengths.max():.4g}"
        return figures

    def _compare_prompt(self, name: str) -> tuple[str, str]:
        """Compares a few texts with a prompt that requests name."""
        texts = TEXTS[4 : 4 + PROMPTED]
        batches, settings = [[("", text)] for text in texts], {"prompt": self.library.prompts[name]}
        try:
            rows = ask(self.server, "", texts, name)
        except InvalidArgumentError as error:
            return name, f"refused: {error}"
        if self._fits(rows, self.library.compute(batches, settings)).all():
            return name, "equal"
        result = "ignored" if self._fits(rows, self.library.compute(batches)).all() else "different"
        self.causes.append(f"the prompt {name!r} of requests is {result}")
        return name, result

    def _has_tokens(self, index: int, tokens: Any) -> bool:
        """Whether ids, or a number of tokens before or after truncation, are the library's."""
        count = len(self.ids[index])
        return tokens in (self.ids[index], count, min(count, self.library.max_tokens or count))

    def _fits(self, rows: Array, reference: Array) -> NDArray[np.bool_]:
        """Whether each row equals its reference; not if it has NaN."""
        limits = self.tolerance * (1 + 2 * np.abs(reference))
        equal: NDArray[np.bool_] = (np.abs(rows - reference) <= limits).all(axis=1)
        return equal

    def _excerpt(self, index: int) -> str:
        text = " | ".join(filter(None, self.items[index]))[:EXCERPT]
        return f"text {index}, {len(self.ids[index])} tokens, {text!r}"


def make_items(library: Library, kinds: Sequence[str]) -> list[Item]:
    """The texts, or pairs; the last four have lengths around the largest number of tokens."""
    special = [f"{token} is a token, {token}too" for token in library.model.tokenizer.all_special_tokens[:4]]
    joined = [f"{first} {second}" for first, second in zip(TEXTS[4:], TEXTS[14:], strict=False)]
    texts = [*dict.fromkeys([*TEXTS, *special, *joined])][: GRID[0]]
    queries = TEXTS[4 : 4 + QUERIES] if library.scores else kinds
    most = min(library.max_tokens or LONGEST, LONGEST)
    for count in (most - 1, most, most + 1, 2 * most):
        long = WORDS * count
        end = bisect_right(
            range(8 * count), count, key=lambda end: len(library.ids_of((queries[0], long[:end])))
        )
        texts.append(long[: max(end - 1, 0)])
    return [(queries[index % len(queries)], text) for index, text in enumerate(texts)]


def _distances(rows: Array, reference: Array) -> Array:
    lengths = np.maximum(np.linalg.norm(reference, axis=1), 1e-6)
    result: Array = np.minimum(np.linalg.norm(rows - reference, axis=1) / lengths, 2.0)
    return result


def _cosines(rows: Array, reference: Array) -> Array:
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(reference, axis=1)
    result: Array = (rows * reference).sum(axis=1) / np.maximum(lengths, 1e-12)
    return result
