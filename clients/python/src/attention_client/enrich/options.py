"""The options of a job, as `enrich()` takes them and as the job reads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Required, TypeVar

from attention_client._embeddings import EmbedOptions
from attention_client.enrich.backend import ModelSpec, Role
from attention_client.enrich.errors import EnrichError
from attention_client.enrich.pooling import Pool
from attention_client.enrich.templates import TextTemplate
from attention_client.enrich.text_options import PassageLayout, TextOptions

CONTEXT_VECTORS, EMBEDDING = "context_vectors", "embedding"
ATTENTION_WEIGHTS = "attention_weights"
Member = TypeVar("Member", bound=StrEnum)


class OnError(StrEnum):
    """What happens if the model refuses a row."""

    FAIL = "fail"
    """The job ends with an error."""
    SKIP = "skip"
    """The row gets null and is listed in OUTPUT.rejects.jsonl."""


class EnrichOptions(TextOptions, total=False):
    """Keyword arguments of `enrich` that do not depend on where the job runs; see `TextOptions` for texts.

    Attributes:
        model: Name of the model. Required.
        column: Column of the query: lists of vectors, lists of token ids, or texts. Exactly one of `column`,
            `text_column` and `template` is required.
        version: Version of the model; default: the highest version that is ready.
        key_column: Column of the key, for cross-attention.
        value_column: Column of the value, for models with a separate value.
        output_column: Name of the new column; default: embedding for text encoders, otherwise
            context_vectors.
        pool: none (default) stores all context vectors of a row; mean, cls and max store one vector.
        weights: Whether to add the attention weights as column attention_weights; default: False.
        on_error: fail (default) ends the job at the first refused row; skip gives such rows null.
        max_errors: With on_error=skip, ends the job when more rows than this are refused, 0 or more;
            default: None, no limit. Checked after each chunk of at most 16,384 rows.
        resume: Whether to continue an unfinished job; default: False. If the output is already complete,
            nothing is computed.
        overwrite: Whether to replace an existing output when the job is finished; default: False.
        progress: Whether to report progress on stderr; default: False.
    """

    model: Required[str]
    column: str | None
    version: str | int
    key_column: str | None
    value_column: str | None
    output_column: str | None
    pool: Pool | str
    weights: bool
    on_error: OnError | str
    max_errors: int | None
    resume: bool
    overwrite: bool
    progress: bool


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options that were checked; the attributes are those of EnrichOptions."""

    model: str
    column: str | None = None
    text_column: str | None = None
    template: str | None = None
    prompt: str | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    passage_tokens: int | None = None
    passage_overlap: int | None = None
    passages: PassageLayout | None = None
    tokenizer: Path | None = None
    version: str = ""
    key_column: str | None = None
    value_column: str | None = None
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
        """The column of each input of the model; for a text of several columns, the first of them."""
        query = self.column if self.column is not None else self.text_template.columns[0]
        named = {Role.QUERY: query, Role.KEY: self.key_column, Role.VALUE: self.value_column}
        return {role: name for role, name in named.items() if name is not None}

    @cached_property
    def text_template(self) -> TextTemplate:
        """How the text of a row is made, for models that take text."""
        if self.template is not None:
            return TextTemplate.parse(self.template)
        return TextTemplate.of_column(self.text_column if self.text_column is not None else self.column or "")

    @property
    def embed(self) -> EmbedOptions:
        """What a call for embeddings states beside its texts."""
        return EmbedOptions(prompt=self.prompt, dimensions=self.dimensions, truncate=self.truncate)

    @property
    def layout(self) -> PassageLayout | None:
        """Where passages are stored; None if texts are not cut."""
        return None if self.passage_tokens is None else self.passages or PassageLayout.ROWS

    def vectors_column(self, model: ModelSpec) -> str:
        """Name of the new column."""
        return self.output_column or (CONTEXT_VECTORS if model.encoder is None else EMBEDDING)

    @property
    def weights_column(self) -> str | None:
        """Name of the column of attention weights; None if there is none."""
        return ATTENTION_WEIGHTS if self.weights else None

    @property
    def skip_refused(self) -> bool:
        """Whether a refused row gets null instead of ending the job."""
        return self.on_error is OnError.SKIP


def read_options(options: EnrichOptions) -> JobOptions:
    """Checks options.

    Raises:
        EnrichError: An option has a value that is not allowed.
        TypeError: An option is unknown, or a required one is missing.
    """
    given: dict[str, Any] = dict(options)
    if "version" in given:
        given["version"] = str(given["version"])
    members: dict[str, type[StrEnum]] = {"pool": Pool, "on_error": OnError, "passages": PassageLayout}
    for name, kind in members.items():
        if given.get(name) is not None:
            given[name] = _member(kind, name, given[name])
    if given.get("tokenizer") is not None:
        given["tokenizer"] = Path(given["tokenizer"])
    read = JobOptions(**given)
    _check_texts(read)
    if read.max_errors is not None and not read.skip_refused:
        raise EnrichError("max_errors needs on_error='skip': otherwise the first refused row ends the job")
    if read.max_errors is not None and read.max_errors < 0:
        raise EnrichError(f"max_errors is {read.max_errors}; it must be 0 or more")
    return read


def _member(members: type[Member], name: str, value: str) -> Member:
    try:
        return members(value)
    except ValueError:
        raise EnrichError(f"{name} is {value!r}; it must be one of {', '.join(members)}") from None


def _check_texts(options: JobOptions) -> None:
    """Refuses options of texts that contradict each other, and a template that cannot be read."""
    sources = {"column": options.column, "text_column": options.text_column, "template": options.template}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise EnrichError(f"exactly one of column, text_column and template is required; given: {found}")
    if options.dimensions is not None and options.dimensions < 1:
        raise EnrichError(f"dimensions is {options.dimensions}; it must be 1 or more")
    if options.passage_tokens is None:
        for name in ("passage_overlap", "passages", "tokenizer"):
            if getattr(options, name) is not None:
                raise EnrichError(f"{name} needs passage_tokens")
    elif options.passage_tokens < 1:
        raise EnrichError(f"passage_tokens is {options.passage_tokens}; it must be 1 or more")
    if options.passage_overlap is not None and options.passage_overlap < 0:
        raise EnrichError(f"passage_overlap is {options.passage_overlap}; it must be 0 or more")
    options.text_template  # noqa: B018 - parsed here for its errors
