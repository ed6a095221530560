"""Golden vectors: inputs of each graph and the outputs of its judge, which every server replays.

The judge is eager PyTorch; of an ONNX file, what the manifest says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from attention_serving.artifact.encoder import NO_QUERY, ClassifierFacts, EncoderFacts
from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.manifest import Graph, GraphKind, Manifest, TensorSpec

# A replay must not take more memory than requests do. Attention scores grow with the square of the length.
MAX_GOLDEN_BYTES = 256 << 20
MAX_GOLDEN_LENGTH = 4096
GOLDEN_ARRAYS_FILE = "golden.npz"
Arrays = dict[str, NDArray[Any]]
# Names of the inputs of a case that begins with a text, or with a pair of texts; or with a query, if queries
# become other token ids than other texts.
TEXTS, QUERY_TEXT = ("text", "text_pair"), "query_text"


@dataclass(frozen=True)
class GoldenCase:
    """Inputs of one graph and the outputs of its judge for them, by name."""

    graph: GraphKind
    inputs: Arrays
    outputs: Arrays


def load_golden(path: Path) -> list[GoldenCase]:
    """Reads golden vectors from a file of tensors named as in `golden_tensors`, ordered by name.

    Raises:
        ArtifactError: The file is absent, damaged or too large.
    """
    try:
        if (size := path.stat().st_size) > MAX_GOLDEN_BYTES:
            raise ArtifactError(path, f"has {size} bytes, which is more than {MAX_GOLDEN_BYTES}")
        tensors = load_file(path)
    except OSError as error:
        raise ArtifactError(path, f"cannot be read: {error.strerror or 'not a file'}") from error
    except (SafetensorError, ValueError) as error:
        raise ArtifactError(path, "is not a file of tensors", details=error) from error
    return _group_golden(path, tensors)


def golden_cases(folder: Path, manifest: Manifest, encode: Callable[..., Arrays] | None) -> list[GoldenCase]:
    """Reads the golden vectors of an artifact; those that begin with a text become those of its tokens.

    Args:
        folder: The artifact's folder.
        manifest: Its manifest.
        encode: From a text, and the second one of a pair, and whether it is a query, to the inputs (1, T) by
            name; None for a model that does not take text.

    Raises:
        ArtifactError: They are absent, damaged or too large, or do not fit the graphs.
    """
    path, cases = folder / manifest.golden, []
    for case in load_golden(path):
        if encode is not None and (texts := texts_of(case)):
            inputs = encode(*texts, is_query=QUERY_TEXT in case.inputs)
            cases.append(GoldenCase(case.graph, inputs, case.outputs))
        else:
            cases.append(case)
    check_golden(path, cases, manifest)
    return cases


def text_inputs(*texts: str, is_query: bool = False) -> Arrays:
    """The inputs of a golden case that begins with a text, or a pair of texts: their UTF-8 bytes."""
    names = (QUERY_TEXT,) if is_query else TEXTS
    return {name: np.frombuffer(text.encode(), np.uint8) for name, text in zip(names, texts, strict=False)}


def token_inputs(
    tokenizer: Tokenizer,
    names: Sequence[str],
    most: int | None,
    facts: EncoderFacts | ClassifierFacts | None = None,
    prompt: str | None = None,
) -> Callable[..., Arrays]:
    """From a text, the second one of a pair, and whether it is a query, to token ids and types (1, T).

    Args:
        tokenizer: The tokenizer.
        names: The names of the ids and, where the model takes them, of the types.
        most: Largest number of tokens, to which texts are cut; None for no limit.
        facts: Of a text encoder or classifier: how its texts are cut and queries or pairs become token ids.
        prompt: The name of a prompt of a classifier; None for its default prompt. Encoders have none here.
    """
    side = "right" if facts is None else facts.truncation_side
    limits, query, template, prefix = dict[Any, int](), NO_QUERY, None, ""
    if isinstance(facts, EncoderFacts):
        limits, query = facts.token_limits, facts.query
    elif facts is not None:
        name = facts.default_prompt if prompt is None else prompt
        template, prefix = facts.templates.get(name), facts.prompts.get(name, "")
    tokenizers = [Tokenizer.from_str(tokenizer.to_str()) for _ in range(2)]
    for kind, cutting in zip(("document", "query"), tokenizers, strict=True):
        if (limit := limits.get(kind, most)) is not None:
            cutting.enable_truncation(limit, direction=side)

    def encode(text: str, second: str | None = None, *, is_query: bool = False) -> Arrays:
        cutting, adds_special = tokenizers[is_query], query.adds_special or not is_query
        if template is None:
            encoding = cutting.encode(prefix + text, second, add_special_tokens=adds_special)
            ids = query.expand(encoding.ids) if is_query else encoding.ids
        else:
            encoding = cutting.encode(template.render(text, second or ""), add_special_tokens=False)
            ids = encoding.ids if most is None else template.restore_suffix(encoding.ids, most)
        columns = (ids, encoding.type_ids)
        return {name: np.array([column], np.int64) for name, column in zip(names, columns, strict=False)}

    return encode


def texts_of(case: GoldenCase) -> list[str]:
    """The text that a golden case begins with, or its pair of texts; empty for any other case."""
    names = [name for name in (*TEXTS, QUERY_TEXT) if name in case.inputs]
    return [bytes(case.inputs[name]).decode(errors="replace") for name in names]


def check_golden(path: Path, cases: Sequence[GoldenCase], manifest: Manifest) -> None:
    """Checks that the cases prove something about every output of every graph, and fit their graphs.

    Raises:
        ArtifactError: A graph has no case, an output of it is not compared, or a case does not fit its graph.
    """
    for case in cases:
        if case.graph not in manifest.graphs:
            raise ArtifactError(path, f"contains golden vectors for graph {case.graph}, which does not exist")
        _check_inputs(path, case, manifest.graphs[case.graph])
    proven = {(case.graph, name) for case in cases for name, array in case.outputs.items() if _proves(array)}
    for kind, graph in manifest.graphs.items():
        unproven = [spec.name for spec in graph.outputs if (kind, spec.name) not in proven]
        if unproven or not graph.outputs:
            outputs = f"output {', '.join(unproven)} of " if unproven else ""
            raise ArtifactError(path, f"contains no golden vectors for {outputs}graph {kind}")


def golden_tensors(cases: list[GoldenCase]) -> Mapping[str, NDArray[Any]]:
    """Names the tensors of golden cases: `<graph>/<index>/<inputs or outputs>/<name>`."""
    return {
        f"{case.graph}/{index}/{side}/{name}": np.asarray(array, order="C")  # scalars stay scalars
        for index, case in enumerate(cases)
        for side, arrays in (("inputs", case.inputs), ("outputs", case.outputs))
        for name, array in arrays.items()
    }


def write_golden_arrays(artifact: Path, manifest: Manifest, kind: GraphKind, folder: Path) -> Path:
    """Writes the golden cases of one graph in NumPy's own format, for programs that have NumPy only.

    The names are `<index>/inputs/<name>` and `<index>/outputs/<name>`.

    Raises:
        ArtifactError: The artifact's golden vectors are damaged.
    """
    cases = [
        case for case in load_golden(artifact / manifest.golden) if case.graph is kind and not texts_of(case)
    ]
    arrays = {name.partition("/")[2]: array for name, array in golden_tensors(cases).items()}
    path = folder / GOLDEN_ARRAYS_FILE
    np.savez(path, **arrays)  # type: ignore[arg-type]  # names that are no identifiers
    return path


def _group_golden(path: Path, tensors: Arrays) -> list[GoldenCase]:
    cases: dict[str, GoldenCase] = {}
    for key, array in sorted(tensors.items()):
        try:
            graph, index, side, name = key.split("/")
            case = cases.setdefault(f"{graph}/{index}", GoldenCase(GraphKind(graph), {}, {}))
        except ValueError as error:
            expected = "<graph>/<index>/<inputs or outputs>/<name>"
            raise ArtifactError(path, f"contains a tensor {key!r}, which is not named {expected}") from error
        (case.inputs if side == "inputs" else case.outputs)[name] = array
    return list(cases.values())


def _proves(eager: NDArray[Any]) -> bool:
    return bool(np.isfinite(eager).any())


def _check_inputs(path: Path, case: GoldenCase, graph: Graph) -> None:
    specs = {spec.name: spec for spec in graph.inputs}
    if case.inputs.keys() != specs.keys():
        names, expected = ", ".join(sorted(case.inputs)), ", ".join(sorted(specs))
        raise ArtifactError(
            path, f"graph {case.graph} takes {expected}; a case of it contains {names or 'none'}"
        )
    for name, array in case.inputs.items():
        if not _fits(array, specs[name]):
            form = f"{array.dtype.name} {list(array.shape)}"
            raise ArtifactError(
                path, f"input {name} of graph {case.graph} is {form}, which does not fit {specs[name]}"
            )


def _fits(array: NDArray[Any], spec: TensorSpec) -> bool:
    return (
        array.dtype.name == spec.data_type
        and array.ndim == len(spec.axes)
        and all(
            size == axis if isinstance(axis, int) else size <= MAX_GOLDEN_LENGTH
            for size, axis in zip(array.shape, spec.axes, strict=True)
        )
    )
