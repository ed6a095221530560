"""Sends the reference texts to a server, alone and in batches, and compares the answers with the library's."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import chain
from json import loads
from typing import Any, Final

import numpy as np

from attention_client._prove.causes import TOGETHER, Cause, CauseSearch, choose_items, cosines, within
from attention_client._prove.library import Item, Library
from attention_client._prove.servers import NotJudgedError, RefusedError, Server, ask
from attention_client._values import Array

TEXTS: Final[list[str]] = loads(files("attention_client").joinpath("_reference_texts.json").read_bytes())
TEXT_COUNT: Final = 64
# Servers take 32 texts in a request, or more.
BATCH, OTHER_BATCH = 16, 7
QUERIES: Final = 4
# Lengths around the model's own are judged up to this one, at which the library still answers in time.
LONGEST: Final = 512
WORDS: Final = (
    "the of and to in is it you that he was for on are with as at be this from I have or by one had not but "
)
PROMPTED: Final = 8
EXCERPT: Final = 60
EQUAL, NOT_EQUAL, NOT_JUDGED = range(3)


@dataclass
class Answers:
    """What a server answers to items, by their indices: rows (d,), numbers of tokens, refusals."""

    rows: dict[int, Array] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)

    def table(self, indices: Sequence[int]) -> Array:
        """The rows of some items, (n, d)."""
        return np.stack([self.rows[index] for index in indices])


def judge(server: Server, library: Library, tolerance: float) -> dict[str, Any]:
    """Judges a server: the report, with `status` and `verdict`.

    Raises:
        NotJudgedError: The server cannot be reached, refuses every request, or answers in another form.
    """
    items, lengths = make_items(library)
    counts = {item: len(library.count_ids(item)) for item in items}
    report: dict[str, Any] = {
        "server": dict(server.describe()),
        "library": library.version,
        "tolerance": tolerance,
    }
    singles = [[index] for index in range(len(items))]
    alone, again = (_ask_all(server, library, items, singles) for _ in range(2))
    indices = sorted(alone.rows.keys() & again.rows.keys())
    if not indices:
        raise NotJudgedError(f"every text is refused: {next(iter(alone.refusals.values()))}")
    reference = library.compute([[items[index]] for index in indices])
    rows, causes = alone.table(indices), list[Cause]()
    report["items"], report["refusals"] = (
        len(items),
        {_excerpt(items[at]): text for at, text in alone.refusals.items()},
    )
    if not np.isfinite(rows).all():
        causes.append(Cause("NaN or infinity", "Answers have numbers that are not finite."))
        rows = np.nan_to_num(rows, posinf=0, neginf=0)
    settings = {}
    if (width := rows.shape[1]) != reference.shape[1]:
        report["width"] = {"server": width, "library": reference.shape[1]}
        if width > reference.shape[1]:
            causes.append(
                Cause("another model", f"Its rows have {width} elements, not {reference.shape[1]}.")
            )
            return _conclude(report, causes, len(indices), len(indices))
        settings = {"dimensions": width}
        causes.append(
            Cause(f"{width} of {reference.shape[1]} dimensions", "Embeddings are shorter than the model's.")
        )
        reference = library.compute([[items[index]] for index in indices], settings)
    equal = within(rows, reference, tolerance)
    report["alone"] = _compare(rows, reference, tolerance, library)
    report["repeated"] = float(np.abs(rows - again.table(indices)).max())
    norms = np.linalg.norm(np.stack([rows, reference]), axis=2)
    report["lengths of vectors"] = {"server": _range(norms[0]), "library": _range(norms[1])}
    search = CauseSearch(library, tolerance, counts)
    chosen = choose_items(rows, reference)
    batches = [[items[indices[at]]] for at in chosen]
    explanation = search.explain(rows[chosen], batches, settings, None)
    rest = [] if equal.all() else search.explain_rest(rows[chosen], batches, explanation)
    causes += [*explanation.causes, *rest]
    noise = float(np.abs(rows[chosen] - explanation.rows).max()) if rest else 0.0
    if report["repeated"] > tolerance + 4 * noise:
        causes.append(Cause("results that vary", "The same request has another answer the second time."))
    differing = set(np.array(indices)[~equal].tolist())
    report["in batches"], orders = [], list[bool]()
    for size, seed in ((BATCH, None), (OTHER_BATCH, 0)):
        groups = _group(items, indices, size, seed)
        answers = _ask_all(server, library, items, groups)
        present = [index for index in chain(*groups) if index in answers.rows]
        if not present:
            report["in batches"].append({"batch": size, "refused": next(iter(answers.refusals.values()))})
            continue
        batched, single = answers.table(present), alone.table(present)
        place = [indices.index(index) for index in present]
        figures = _compare(batched, reference[place], tolerance, library)
        change = np.abs(batched - single).max(axis=1)
        report["in batches"].append(
            {"batch": size, **figures, "largest difference from alone": float(change.max())}
        )
        differing |= set(np.array(present)[~within(batched, reference[place], tolerance)].tolist())
        unequal = ~within(batched, single, tolerance + 4 * noise)
        if not unequal.any():
            continue
        position = {index: at for at, index in enumerate(present)}
        moved = [_is_moved(batched, single, position, group, tolerance) for group in groups]
        orders.append(sum(moved) >= 0.8 * unequal.sum())  # noqa: PLR2004 - some move to equal texts
        if orders[-1]:
            causes.append(
                Cause("results in another order", "Answers in a batch are those of its other texts.")
            )
        else:
            worst = sorted(
                groups, key=lambda group: -max(change[position[i]] for i in group if i in position)
            )[:3]
            worst = [[index for index in group if index in position] for group in worst]
            part = batched[[position[index] for group in worst for index in group]]
            company = [[items[index] for index in group] for group in worst]
            padding = search.explain(part, company, explanation.settings, TOGETHER).causes
            causes += padding or [
                Cause("dependence on the batch", "Texts have other results beside other texts.")
            ]
    report["order"] = "swapped in batches" if any(orders) else "kept"
    report["tokens"] = _compare_tokens(server, library, items, counts, alone)
    report["grid of lengths"] = {
        f"{counts[items[index]]} tokens": "refused"
        if index not in alone.rows
        else "different"
        if index in differing
        else "equal"
        for index in lengths
    }
    report["prompts"] = _compare_prompts(server, library, causes, tolerance)
    return _conclude(report, causes, len(differing), len(indices))


def make_items(library: Library) -> tuple[list[Item], list[int]]:
    """The texts, or pairs, and the indices of those with lengths around the largest number of tokens."""
    reader = library.model.tokenizer
    special = [f"{token} is a token, {token}too" for token in reader.all_special_tokens[:4]]
    joined = [f"{first} {second}" for first, second in zip(TEXTS[4:], TEXTS[14:], strict=False)]
    texts = [*dict.fromkeys([*TEXTS, *special, *joined])][: TEXT_COUNT - 4]
    queries = TEXTS[4 : 4 + QUERIES] if library.scores else [""]
    items = [(queries[index % len(queries)], text) for index, text in enumerate(texts)]
    most = min(library.max_tokens or LONGEST, LONGEST)
    long = WORDS * (2 * most)
    for count in (most - 1, most, most + 1, 2 * most):
        low, high = 0, 8 * count  # characters; a text has no more tokens with one character less
        while low < high:
            middle = (low + high + 1) // 2
            fits = len(library.count_ids((queries[0], long[:middle]))) <= count
            low, high = (middle, high) if fits else (low, middle - 1)
        items.append((queries[0], long[:low]))
    return items, [*range(len(texts), len(items))]


def _ask_all(server: Server, library: Library, items: list[Item], groups: list[list[int]]) -> Answers:
    answers = Answers()
    for group in groups:
        query, texts = items[group[0]][0], [items[index][1] for index in group]
        try:
            rows, tokens = ask(server, query, texts, None, scores=library.scores)
        except RefusedError as error:
            answers.refusals |= dict.fromkeys(group, str(error))
            continue
        answers.rows |= dict(zip(group, rows, strict=True))
        if tokens is not None and len(group) == 1:
            answers.tokens[group[0]] = tokens
    return answers


def _group(items: list[Item], indices: Sequence[int], size: int, seed: int | None) -> list[list[int]]:
    """The batches: of one query each, in order or shuffled."""
    order = list(indices)
    if seed is not None:
        random.Random(seed).shuffle(order)  # noqa: S311 - not a secret
    queries: dict[str, list[int]] = {}
    for index in order:
        queries.setdefault(items[index][0], []).append(index)
    return [part[at : at + size] for part in queries.values() for at in range(0, len(part), size)]


def _is_moved(
    batched: Array, single: Array, position: dict[int, int], group: list[int], tolerance: float
) -> int:
    """How many rows of a batch are not those of their texts, but those of others in the batch."""
    places = [position[index] for index in group if index in position]
    count = 0
    for place in places:
        fits = within(single[places], np.broadcast_to(batched[place], single[places].shape), tolerance)
        count += bool(fits.any()) and not fits[places.index(place)]
    return count


def _compare(rows: Array, reference: Array, tolerance: float, library: Library) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "equal": int(within(rows, reference, tolerance).sum()),
        "of": len(rows),
        "largest difference": float(np.abs(rows - reference).max()),
    }
    if not library.scores:
        angles = cosines(rows, reference)
        figures |= {"smallest cosine": float(angles.min()), "mean cosine": float(angles.mean())}
    return figures


def _compare_tokens(
    server: Server, library: Library, items: list[Item], counts: dict[Item, int], alone: Answers
) -> dict[str, Any]:
    """Ids if the server tells them, otherwise numbers of tokens, of whole texts or of those that are cut."""
    equal, first, total = 0, "", 0
    for index, item in enumerate(items):
        theirs: Any = alone.tokens.get(index)
        ours: Any = (counts[item], min(counts[item], library.max_tokens or counts[item]))
        if not library.scores and index in alone.rows:
            try:
                ids = server.tokenize(item[1])
            except (RefusedError, KeyError, TypeError, IndexError) as error:
                ids, first = None, first or f"no ids: {error}"
            theirs, ours = (theirs, ours) if ids is None else (ids, (library.count_ids(item),))
        if theirs is None:
            continue
        total, equal = total + 1, equal + (theirs in ours)
        if theirs not in ours:
            first = (
                first or f"{_excerpt(item)}: {str(theirs)[:EXCERPT]}; the library {str(ours[0])[:EXCERPT]}"
            )
    return {"equal": equal, "of": total, **({"first difference": first} if first else {})}


def _compare_prompts(
    server: Server, library: Library, causes: list[Cause], tolerance: float
) -> dict[str, str]:
    """Whether the model's prompts, by name, have their effect. Not asked if default results differ."""
    results: dict[str, str] = {}
    texts = TEXTS[4 : 4 + PROMPTED]
    for name in [] if library.scores or causes else server.prompts(library.prompts):
        try:
            rows, _ = ask(server, "", texts, name, scores=False)
        except RefusedError as error:
            results[name] = f"refused: {error}"
            continue
        batches = [[("", text)] for text in texts]
        if within(rows, library.compute(batches, {"prompt": library.prompts[name]}), tolerance).all():
            results[name] = "equal"
            continue
        is_ignored = within(rows, library.compute(batches), tolerance).all()
        results[name] = "ignored" if is_ignored else "different"
        causes.append(Cause(f"prompt {name!r} is {results[name]}", "Requests name it."))
    return results


def _conclude(report: dict[str, Any], causes: list[Cause], differing: int, total: int) -> dict[str, Any]:
    """Adds causes, status and the verdict in one line."""
    report["causes"] = {cause.name: cause.text for cause in causes}
    report["status"] = NOT_EQUAL if causes else EQUAL
    refused = f"; {len(report['refusals'])} refused" if report["refusals"] else ""
    figures = report.get("alone", {})
    largest = f"largest difference {figures['largest difference']:.1e}" if figures else ""
    cosine = f", smallest cosine {figures['smallest cosine']:.6f}" if "smallest cosine" in figures else ""
    if not causes:
        report["verdict"] = f"equal: {total} of {total}, alone and in batches{refused}; {largest}{cosine}"
    else:
        names = "; then ".join(report["causes"])
        report["verdict"] = (
            f"not equal: {differing} of {total} differ{refused}; {largest}{cosine}; likely cause: {names}"
        )
    return report


def _range(values: Array) -> str:
    return f"{values.min():.4g} to {values.max():.4g}"


def _excerpt(item: Item) -> str:
    return repr(" | ".join(part for part in item if part)[:EXCERPT])
