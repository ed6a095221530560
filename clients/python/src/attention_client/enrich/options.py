"""The options of a job, as `enrich()` takes them and as the job reads them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any, get_args

from attention_client._client import InputKind
from attention_client._values import Output, OutputType
from attention_client.enrich.outcome import EnrichError, UsageError
from attention_client.enrich.texts import TextTemplate


class Role(StrEnum):
    """The model input that a column feeds."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"


class OnError(StrEnum):
    """What happens if the model refuses a row."""

    FAIL = "fail"
    """The job ends with an error."""
    SKIP = "skip"
    """The row gets null and is listed in OUTPUT.rejects.jsonl."""


class Pool(StrEnum):
    """What is stored of the (T, d) context vectors of a sequence."""

    NONE = "none"
    """All of them: (T, d)."""
    MEAN = "mean"
    """Their mean: (d,)."""
    CLS = "cls"
    """The first one, which models of the BERT family compute for the token [CLS]: (d,)."""
    MAX = "max"
    """The maximum of each element: (d,)."""


class PassageLayout(StrEnum):
    """Where the passages of a text are stored."""

    ROWS = "rows"
    """One row for each passage, without the columns of the text."""
    LISTS = "lists"
    """One row for each row of the table, with lists of passages and of embeddings."""


@dataclass(frozen=True, kw_only=True)
class EnrichOptions:
    r"""Keyword arguments of `enrich` that do not depend on where the job runs, once they are checked.

    The help of the commands has these texts too; names in backticks are options.

    Attributes:
        model: Name of the model. Required.
        version: Version of the model. Default: the highest version that is ready.
        column: Column of the query: lists of vectors, lists of token ids, or texts. Exactly one of `column`,
            `text_column` and `template` is required.
        key_column: Column of the key, for cross-attention.
        value_column: Column of the value, for models with a separate value.
        context: A .npy file of vectors, or a table with them in `key_column` and `value_column`: all its rows
            are one memory, in place of key and value, to which every row of the input attends. Also for
            self-attention.
        output_column: Name of the new column. Default: embedding for text encoders, otherwise
            context_vectors.
        pool: Store all context vectors of a row (none), or one vector: their mean, the first (cls) or the
            maximum of each element (max).
        weights: Add the attention weights too, as column attention_weights.
        text_column: Column of texts, for models that take text.
        template: Text of each row, with names of columns in braces: "{title}: {body}". A null counts as an
            empty text; a row of nulls only is null. {{ and }} are braces of the text. On the
            command line, \n is a new line.
        prompt: For text encoders: name of the prompt that is put before each text; "" for none. Default: the
            model's own.
        input_kind: For text encoders: what the texts are, in place of `prompt`, as of
            `AttentionClient.embed`: query, document, classification or clustering.
        outputs: For text encoders: what to store of each text, all of it from one pass: one or more of dense,
            sparse and token_vectors, separated by commas. Sparse embeddings become a column NAME_sparse of
            lists of token ids and weights, and token vectors a column NAME_token_vectors, where NAME is that
            of the new column. Default: dense.
        top_k: Largest number of weights of a sparse embedding, of which the largest are stored. Default: all
            that the model has.
        dimensions: For text encoders: number of leading elements of each embedding, normalised again if the
            model normalises. Default: all.
        output_type: For text encoders: type of the elements of embeddings, as of `AttentionClient.embed`:
            float32 (the default), int8, uint8, binary or ubinary.
        truncate: For text encoders: cut texts with more tokens than the model takes, or refuse them. Default:
            the model's setting.
        passage_tokens: For text encoders: cut texts into passages of at most this many tokens, special tokens
            and prompt included (chunking). Default: texts are not cut.
        passage_overlap: Tokens that a passage repeats of the one before, at most; up to half of a passage.
            Default: 0.
        passages: One row for each passage, without the columns of the text (rows, the default), or lists of
            passages in each row (lists).
        tokenizer: Tokenizer of the model, tokenizer.json or a folder with it. Passages on servers need it.
        on_error: If the model refuses a row, end the job (fail), or give the row null and list it in
            OUTPUT.rejects.jsonl (skip).
        max_errors: If refused rows are skipped, end the job when there are more than this, 0 or more.
            Default: no limit. Checked after each chunk of at most 16,384 rows.
        resume: Continue an unfinished job. If the output is already complete, nothing is computed.
        overwrite: Replace an existing output, once the new one is complete.
        progress: Report progress on stderr.
    """

    model: str
    version: str = ""
    column: str | None = None
    text_column: str | None = None
    template: str | None = None
    prompt: str | None = None
    input_kind: InputKind | None = None
    outputs: str | None = None
    top_k: int | None = None
    dimensions: int | None = None
    output_type: OutputType | None = None
    truncate: bool | None = None
    passage_tokens: int | None = None
    passage_overlap: int | None = None
    passages: PassageLayout | None = None
    tokenizer: Path | None = None
    key_column: str | None = None
    value_column: str | None = None
    context: str | None = None
    output_column: str | None = None
    pool: Pool = Pool.NONE
    weights: bool = False
    on_error: OnError = OnError.FAIL
    max_errors: int | None = None
    resume: bool = False
    overwrite: bool = False
    progress: bool = False

    @property
    def columns(self) -> Mapping[Role, str]:
        """The column of each input that the table has; for a text of several columns, the first of them."""
        query = self.column if self.column is not None else self.text_template.columns[0]
        if self.context is not None:  # has the others
            return {Role.QUERY: query}
        columns = {Role.QUERY: query, Role.KEY: self.key_column, Role.VALUE: self.value_column}
        return {role: name for role, name in columns.items() if name is not None}

    @cached_property
    def text_template(self) -> TextTemplate:
        """How the text of a row is made, for models that take text."""
        if self.template is not None:
            return TextTemplate.parse(self.template)
        return TextTemplate((("", self.text_column if self.text_column is not None else self.column),))

    @property
    def heads(self) -> tuple[str, ...]:
        """What is stored of each text: some of OUTPUTS, in their order."""
        return tuple((self.outputs or OUTPUTS[0]).split(","))

    @property
    def layout(self) -> PassageLayout | None:
        """Where passages are stored; None if texts are not cut."""
        return None if self.passage_tokens is None else self.passages or PassageLayout.ROWS


OUTPUTS: tuple[str, ...] = get_args(Output)
MEMBERS: Mapping[str, type[StrEnum]] = {"pool": Pool, "on_error": OnError, "passages": PassageLayout}
ALLOWED: dict[str, Iterable[str]] = {**dict(MEMBERS), "provider": ("cpu", "cuda"), "engine": ("ray",)}
ALLOWED |= {"output_type": get_args(OutputType), "input_kind": get_args(InputKind)}
LEAST = {"max_errors": 0, "dimensions": 1, "top_k": 1, "passage_tokens": 1, "passage_overlap": 0}
LEAST |= {"retry_seconds": 0, "workers": 1, "cores_per_worker": 1}


def read_options(options: Mapping[str, Any]) -> EnrichOptions:
    """Checks options.

    Raises:
        UsageError: Options contradict each other.
        EnrichError: An option has a value that is not allowed.
        TypeError: An option is unknown, or a required one is missing.
    """
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    _check_combinations(values)
    check_values(values)
    kinds: dict[str, Callable[[Any], Any]] = {**MEMBERS, "version": str, "tokenizer": Path}
    kinds |= {"context": _absolute, "outputs": _read_outputs}
    for name in values.keys() & kinds.keys():
        values[name] = kinds[name](values[name])
    checked = EnrichOptions(**values)
    checked.text_template  # noqa: B018 - parsed here for its errors
    return checked


def _absolute(path: str | PathLike[str]) -> str:
    """A path that other processes of a job read alike; a URL as it is."""
    text = fspath(path)
    return text if "://" in text else str(Path(text).expanduser().absolute())


def _read_outputs(names: str | Iterable[str]) -> str:
    """Names separated by commas, or in a list, each once and in the order of OUTPUTS."""
    items = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    if not items or not set(items) <= set(OUTPUTS):
        raise EnrichError(f"outputs is {names!r}; it must have one or more of {', '.join(OUTPUTS)}")
    return ",".join(name for name in OUTPUTS if name in items)


def _check_combinations(options: Mapping[str, Any]) -> None:
    sources = [name for name in ("column", "text_column", "template") if name in options]
    if len(sources) != 1:
        names = " and ".join(sources) or "none"
        raise UsageError(f"exactly one of column, text_column and template is required; given: {names}")
    if "max_errors" in options and options.get("on_error") != OnError.SKIP:
        raise UsageError("max_errors needs on_error='skip': otherwise the first refused row ends the job")
    if "input_kind" in options and "prompt" in options:
        raise UsageError("input_kind chooses a prompt: leave out prompt")
    for name in ("passage_overlap", "passages", "tokenizer"):
        if name in options and "passage_tokens" not in options:
            raise UsageError(f"{name} needs passage_tokens")


def check_values(options: Mapping[str, Any]) -> None:
    """Checks the values of options, each by itself; None is allowed.

    Raises:
        EnrichError: A value is not allowed.
    """
    for name, value in options.items():
        if value is not None and not value >= LEAST.get(name, value):
            raise EnrichError(f"{name} is {value}; it must be {LEAST[name]} or more")
        if value is not None and value not in tuple(ALLOWED.get(name, (value,))):
            raise EnrichError(f"{name} is {value!r}; it must be one of {', '.join(ALLOWED[name])}")
