"""The manifest of an artifact: its model, its graphs and the hashes of its files.

An artifact is a folder `<repository>/<model name>/<version>/`. Its graphs compute the same function and
differ in their inputs and outputs, so that a request pays only for what it uses.
"""

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from attention_serving.artifact.encoder import ClassifierFacts, EncoderFacts
from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.external_data import external_locations
from attention_serving.artifact.kernels import AttentionOperator
from attention_serving.artifact.names import MAX_VERSION, NAME_PATTERN, check_aliases
from attention_serving.artifact.tolerance import Record, Size, Tolerance

MANIFEST_FILE = "manifest.json"
# Manifests of real models have a few KiB.
MAX_MANIFEST_BYTES = 1 << 20
MAX_PROBLEMS = 3
MAX_WINDOW = 2**31 - 1
GRAPH_SUFFIX = ".onnx"
# The key of `made_with` that names what computed the golden vectors, and what did without it.
JUDGE, EAGER = "judge", "eager PyTorch"
BATCH_AXIS = "batch"
KEY_LENGTHS = "key_lengths"
QUERY_LENGTHS = "query_lengths"
POSITIONS = "positions"
TOKEN_TYPES = "token_types"  # noqa: S105 - not a password
KEY_POSITIONS = "key_positions"
PROJECTED = ("projected_keys", "projected_values")
ATTENTION_MASK = "attention_mask"
BLOCK_ROWS = "block_rows"
WEIGHTS_RANKS = (3, 4)

# Numbers are bounded so that products of them are numbers too, and fit the messages that describe a model.
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
NumHeads = Annotated[int, Field(ge=0, le=2**16)]
Step = Annotated[int, Field(ge=1, le=2**16)]
Shift = Annotated[int, Field(ge=-(2**31), le=2**31)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class GraphKind(StrEnum):
    """The inputs and outputs of a graph beside those of the model itself."""

    PLAIN = "plain"
    """Nothing more. All sequences of a batch have the same length."""
    LENGTHS = "lengths"
    """Takes lengths int64 (B,) of some axes: `key_lengths`, the rows of the last input; of non-attention
    modules also `query_lengths`, the rows of the first input, and `<axis>_lengths` of any other axis."""
    MASK = "mask"
    """Takes `attention_mask` bool (B, 1 or H, Tq, Tk), True = may attend; for non-attention modules
    (B, 1, Tq, Tk)."""
    WEIGHTS = "weights"
    """Takes `attention_mask`, and also returns `attention_weights` (B, H, Tq, Tk). That of a text encoder
    takes `key_lengths`, and returns the weights of all layers (B, L, H, T, T) beside the outputs of `tokens`.
    """
    TOKENS = "tokens"
    """Of a text encoder: takes `key_lengths`, and also returns `context_vectors` (B, T, d), a vector for each
    token, and `token_weights` (B, T) if it has them. The graphs `plain` and `lengths` return `embedding`
    (B, d) only; those of an encoder without dense embeddings return its only head: `sparse_embedding` (B, V),
    or `context_vectors`."""
    QUERY = "query"
    """Of a text encoder that computes queries in another way than documents: takes their token ids, and
    returns `token_weights` (B, T)."""
    PREFIX = "prefix"
    """Of a causal reranker: takes the token ids of a prefix (B, P), and returns the keys and values of all
    layers, `prefix_keys` and `prefix_values` (B, L, Hkv, P, d)."""
    SUFFIX = "suffix"
    """Of a causal reranker: takes `key_lengths`, and one prefix, whose keys and values (1, L, Hkv, P, d) all
    sequences of a batch share. Returns what `plain` returns for the prefix and each sequence."""
    BLOCKS = "blocks"
    """As `plain` for long sequences: attends in blocks of `block_rows` query rows (int64 scalar), so that its
    memory grows with the length and not with its square. Absent if a graph cannot be computed in blocks."""
    MASK_BLOCKS = "mask_blocks"
    """As `mask`, in blocks of `block_rows` query rows."""
    PROJECT = "project"
    """Takes `key` (B, Tk, d_key), `value` where the module takes it, and `key_positions` int64 (B, Tk) for
    rotary modules. Returns a context: `projected_keys` (B, Hkv, Tk, d_k) and `projected_values`
    (B, Hkv, Tk, d_v)."""
    CONTEXT = "context"
    """Takes the query and a context; `positions` int64 (B, Tq) for rotary modules, and also `key_positions`
    (B, Tk) for those with a rule of positions. Returns what `plain` returns."""
    CONTEXT_WEIGHTS = "context_weights"
    """As `context`; takes `attention_mask` as `weights` does, and returns the attention weights too."""


OF_CONTEXTS = (GraphKind.PROJECT, GraphKind.CONTEXT, GraphKind.CONTEXT_WEIGHTS)
"""The graphs of stored contexts, which modules that take text lack."""
OF_ENCODERS = (GraphKind.TOKENS, GraphKind.QUERY)
"""The graphs that only text encoders have."""
OF_RERANKERS = (GraphKind.PREFIX, GraphKind.SUFFIX)
"""The graphs that only causal rerankers have."""
TEXT_ATTENTION_GRAPHS = tuple(
    kind for kind in GraphKind if kind not in (*OF_ENCODERS, *OF_RERANKERS, *OF_CONTEXTS)
)
"""The graphs of an attention module that takes text."""
ATTENTION_GRAPHS = (*TEXT_ATTENTION_GRAPHS, *OF_CONTEXTS)
"""The graphs of any other attention module."""
IN_BLOCKS = {GraphKind.PLAIN: GraphKind.BLOCKS, GraphKind.MASK: GraphKind.MASK_BLOCKS}
"""By graph, the one that computes the same in blocks of query rows."""


class TensorSpec(Record):
    """An input or output of a graph. An axis is symbolic (str) or fixed (int)."""

    name: str
    data_type: Literal["float32", "int64", "bool"]
    axes: tuple[str | Size, ...]
    exclusive_upper_bound: Size | tuple[Size, ...] | None = None
    """For ids, which count from 0: each is below this bound, or below that of its column if ids (B, F) have a
    bound for each."""

    @property
    def length_axis(self) -> str | int:
        """The second axis, the rows of each sequence: fixed (int) for vectors (B, d); 1 for scalars (B,)."""
        return self.axes[1] if len(self.axes) > 1 else 1


def sequence_axes(specs: Iterable[TensorSpec]) -> list[str]:
    """The symbolic length axis of each tensor that has one."""
    return [spec.length_axis for spec in specs if isinstance(spec.length_axis, str)]


def has_weights_axes(spec: TensorSpec) -> bool:
    """Whether the axes of a tensor may be those of attention weights, (B, H, Tq, Tk) or (B, Tq, Tk).

    A fixed number of columns is that of keys only if there are as many rows: it may be that of classes.
    """
    if spec.data_type != "float32" or len(spec.axes) not in WEIGHTS_RANKS:
        return False
    *heads, query, key = spec.axes[1:]
    return all(isinstance(axis, int) for axis in heads) and (isinstance(key, str) or query == key)


class DerivedAxis(Record):
    """The size of an axis of outputs, which follows from that of a sequence axis of the inputs.

    Of T rows on `axis` it is (scale * T + shift) // stride * repeat + extra.
    """

    axis: str
    scale: Step = 1
    shift: Shift = 0
    stride: Size = 1
    repeat: Step = 1
    extra: Shift = 0

    def size(self, rows: int) -> int:
        """The size for `rows` on the sequence axis."""
        return max(0, (self.scale * rows + self.shift) // self.stride * self.repeat + self.extra)


DerivedAxes = Mapping[str, DerivedAxis]


def all_sizes(sizes: Mapping[str, int], derived: DerivedAxes) -> dict[str, int]:
    """The sizes of symbolic axes, with those of the axes that derive from them."""
    further = {name: axis.size(sizes[axis.axis]) for name, axis in derived.items() if axis.axis in sizes}
    return {**sizes, **further}


class Graph(Record):
    """One ONNX file of a model."""

    file: FileName
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attention: tuple[AttentionOperator, ...] = ()
    """Its Attention operators; empty in earlier manifests, and if other operators compute attention."""


class Cost(Record):
    """Floating-point operations, all 0 if unknown. A multiply-add counts as two."""

    flops_per_query: Count
    flops_per_key: Count
    flops_per_pair: Count


class AttentionPattern(NamedTuple):
    """Which keys the rows of a layer may attend to by its own rule.

    Attributes:
        causal: Whether a query row attends only to keys up to its own position.
        window: A query row attends only to keys fewer than this many rows away; 0 if the distance does not
            matter.
    """

    causal: bool
    window: int


class Manifest(Record):
    """The description of an artifact, and the hashes of its files."""

    format_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    version: Annotated[int, Field(ge=1, le=MAX_VERSION)]
    aliases: tuple[str, ...] = ()
    """Further names, under which requests reach the model unless a model has this name. They may contain
    slashes."""
    description: str
    config: dict[str, Any]
    """The attention configuration; empty for non-attention modules."""
    num_heads: NumHeads
    """0 if unknown, as for non-attention modules."""
    causal: bool
    opset: Size
    """Version of the standard's operators: the highest of all graphs."""
    precision: Literal["fp32", "fp16", "bf16", "int8"]
    activation_scales: Literal["row", "fixed"] | None = None
    """For int8, the activations that share a scale: those of a row, or all of all runs. Absent in earlier
    manifests and of some ONNX files, where all rows of a run share one and affect each other."""
    tolerance: Tolerance
    parameters: Count
    cost: Cost
    graphs: dict[GraphKind, Graph]
    max_lengths: dict[str, Size] = Field(default_factory=dict)
    """By symbolic axis, the largest number of rows that the model takes; axes without a limit are absent."""
    min_lengths: dict[str, Size] = Field(default_factory=dict)
    """By symbolic axis, the smallest number of rows that the model takes; axes without a limit are absent."""
    derived_axes: dict[str, DerivedAxis] = Field(default_factory=dict)
    """By symbolic axis of outputs that is not an axis of an input, how its size follows from one."""
    length_multiples: dict[str, Size] = Field(default_factory=dict)
    """By symbolic axis, what every number of rows must be a multiple of; axes of any number are absent."""
    lengths: dict[str, str] = Field(default_factory=dict)
    """Of non-attention modules with masks of keys: by input that holds lengths in place of one, its axis."""
    attention_weights: str = ""
    """Of non-attention modules: the output with attention weights (B, H, Tq, Tk) or (B, Tq, Tk), if any."""
    refuses_nan: bool = False
    """Whether servers refuse NaN in inputs: it makes NaN of other results than in eager PyTorch."""
    branches_as_traced: tuple[str, ...] = ()
    """Lines of code that branch on values of inputs. The graphs follow one side, as the caller of the export
    has accepted."""
    encoder: EncoderFacts | None = None
    """For text encoders."""
    classifier: ClassifierFacts | None = None
    """For text classifiers and rerankers."""
    tokenizer: FileName | None = None
    """For models that take text: the tokenizer, in the format of the `tokenizers` library."""
    weights: FileName | None = None
    """For models with large weights: the file that all graphs share."""
    golden: FileName
    parity_report: FileName
    files: dict[FileName, str]
    """SHA-256 of every file of the artifact except the manifest."""
    made_with: dict[str, str]
    """Versions of the libraries that the artifact was made with, and the judge if it is not eager PyTorch."""
    source: str = ""
    """SHA-256 of the weights, configuration and options that were exported."""

    @model_validator(mode="after")
    def _check_aliases(self) -> Self:
        check_aliases(self.aliases, [self.name])
        return self

    @model_validator(mode="after")
    def _check_derived_axes(self) -> Self:
        inputs = {axis for graph in self.graphs.values() for axis in sequence_axes(graph.inputs)}
        for name, axis in self.derived_axes.items():
            if axis.axis not in inputs or name in {BATCH_AXIS, *inputs}:
                raise ValueError(
                    f"derived axis {name!r} of {axis.axis!r}: must derive from an axis of inputs"
                )
        return self

    @model_validator(mode="after")
    def _check_attention_weights(self) -> Self:
        for graph in self.graphs.values() if self.attention_weights else ():
            if not any(
                has_weights_axes(spec) for spec in graph.outputs if spec.name == self.attention_weights
            ):
                raise ValueError(f"attention_weights: {self.attention_weights!r} is not such an output")
        return self

    @cached_property
    def runs_alone(self) -> bool:
        """Whether each sequence needs a run of its own.

        Earlier int8 artifacts, and some ONNX files, compute one scale from all rows of a run: other sequences
        would change a result, and a NaN in one would spoil the others.
        """
        return self.precision == "int8" and self.activation_scales is None

    @property
    def truncation_side(self) -> Literal["right", "left"]:
        """Which end of a text that is cut loses tokens, unless a request says otherwise."""
        facts = self.encoder or self.classifier
        return "right" if facts is None else facts.truncation_side

    @property
    def judge(self) -> str:
        """What computed the outputs of the golden vectors."""
        return self.made_with.get(JUDGE, EAGER)

    @property
    def attention_patterns(self) -> tuple[AttentionPattern, ...]:
        """The rule of each layer of a text encoder, or that of an attention module; empty for other modules.

        A configuration without a rule, as in earlier manifests, has that of the whole model.
        """
        if not self.num_heads or self.classifier is not None:
            return ()
        layers: Any = [self.config]
        if self.encoder is not None:
            layer_configs = self.config.get("layers")
            layers = layer_configs if isinstance(layer_configs, list) else [{}] * self.encoder.layers
        return tuple(self._pattern(layer if isinstance(layer, dict) else {}) for layer in layers)

    def _pattern(self, config: dict[str, Any]) -> AttentionPattern:
        window = config.get("window", 0)
        is_known = isinstance(window, int) and 0 <= window <= MAX_WINDOW
        return AttentionPattern(bool(config.get("causal", self.causal)), window if is_known else 0)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads the manifest of an artifact.

        Raises:
            ArtifactError: The manifest is absent or invalid.
        """
        return cls.parse(folder, read_manifest(folder))

    @classmethod
    def parse(cls, folder: Path, content: bytes) -> Self:
        """The manifest of an artifact whose bytes were read.

        Raises:
            ArtifactError: The manifest is invalid.
        """
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise ArtifactError(folder / MANIFEST_FILE, _problems(error)) from error

    def verify_files(self, folder: Path, copy: Path | None = None) -> None:
        """Compares every file with its recorded hash, and what the graphs name with the list of files.

        Args:
            folder: The artifact's folder.
            copy: A folder to which every file is copied first. Then the copies are compared.

        Raises:
            ArtifactError: A file is missing, is not listed, differs or lies outside the repository, or a
                graph names a file that is not listed.
            OSError: A file cannot be copied.
        """
        manifest, verified = folder / MANIFEST_FILE, copy or folder
        graphs = [graph.file for graph in self.graphs.values()]
        for name in (*graphs, self.weights, self.tokenizer, self.golden, self.parity_report):
            if name is not None and name not in self.files:
                raise ArtifactError(manifest, f"lists no hash for {name}")
        for name, expected in self.files.items():
            check_inside(folder, folder / name)
            if not (folder / name).is_file():  # a pipe would block the reader
                raise ArtifactError(folder / name, "is not a regular file")
            if copy is not None:
                shutil.copyfile(folder / name, copy / name)
            digest = file_hash(verified / name)
            if digest != expected:
                raise ArtifactError(folder / name, f"SHA-256 is {digest}, the manifest says {expected}")
        for name in graphs:
            self._check_graph_file(verified / name)

    def _check_graph_file(self, path: Path) -> None:
        # By other suffixes, ONNX Runtime recognises formats that are not read here.
        if path.suffix != GRAPH_SUFFIX:
            raise ArtifactError(path, f"the name of a graph must end with {GRAPH_SUFFIX}")
        if unlisted := sorted(external_locations(path) - self.files.keys()):
            raise ArtifactError(path, f"names external data that the manifest does not list: {unlisted[0]!r}")


def read_manifest(folder: Path) -> bytes:
    """The bytes of the manifest of an artifact.

    Raises:
        ArtifactError: It cannot be read, or is too large.
    """
    return read_bounded(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)


def check_inside(folder: Path, path: Path) -> None:
    """Checks that a file of an artifact is a part of its repository, wherever symbolic links lead.

    Links within the repository are allowed: Kubernetes mounts volumes with them.

    Args:
        folder: The artifact's folder, `<repository>/<model name>/<version>`.
        path: The file.

    Raises:
        ArtifactError: The file does not exist or lies outside the repository.
    """
    try:
        repository, real = folder.absolute().parents[1].resolve(strict=True), path.resolve(strict=True)
    except OSError as error:
        raise ArtifactError(path, f"cannot be read: {error.strerror}") from error
    except RuntimeError as error:
        raise ArtifactError(path, "cannot be read: its symbolic links lead in a circle") from error
    if not real.is_relative_to(repository):
        raise ArtifactError(path, "lies outside the model repository", details=f"it is {real}")


def read_bounded(path: Path, limit: int) -> bytes:
    """Reads a file of at most `limit` bytes.

    Raises:
        ArtifactError: The file cannot be read, or is larger.
    """
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ArtifactError(path, f"cannot be read: {error.strerror}") from error
    if len(content) > limit:
        raise ArtifactError(path, f"is larger than the limit of {limit} bytes")
    return content


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
        ArtifactError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ArtifactError(path, f"cannot be read: {error.strerror}") from error


def damage(folder: Path) -> str:
    """What is wrong with the artifact of a folder; empty if all its files have their recorded hashes."""
    try:
        Manifest.load(folder).verify_files(folder)
    except ArtifactError as error:
        return error.reason
    return ""


def is_whole(folder: Path) -> bool:
    """Whether the folder holds an artifact whose files all have their recorded hashes."""
    return not damage(folder)


def _problems(error: ValidationError) -> str:
    """The first problems, each with its field."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [
        f"{'.'.join(map(str, problem['loc']))} {problem['msg']}".strip()
        for problem in problems[:MAX_PROBLEMS]
    ]
    further = len(problems) - len(texts)
    return "; ".join(texts) + (f"; and {further} more" if further else "")
