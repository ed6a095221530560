"""The manifest: read back as written, and refused if the artifact is damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.manifest import (
    MANIFEST_FILE,
    AttentionPattern,
    GraphKind,
    Manifest,
    file_hash,
)
from attention_serving.artifact.names import ModelId
from tests.server.samples import TEXT
from tests.support.artifacts import edit_json

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def manifest(artifacts: Path, tmp_path: Path) -> Manifest:
    """The manifest of a text model, of which `tmp_path` is a copy."""
    return Manifest.load(shutil.copytree(artifacts / TEXT / "1", tmp_path, dirs_exist_ok=True))


@pytest.mark.parametrize("data", [None, b"", b"[]", b"\xff\xfe{}", b" " * (2 << 20)])
def test_a_manifest_that_is_absent_or_does_not_parse_is_refused_by_path(
    data: bytes | None, tmp_path: Path
) -> None:
    if data is not None:
        (tmp_path / MANIFEST_FILE).write_bytes(data)
    with pytest.raises(ArtifactError, match=r"manifest\.json: "):
        Manifest.load(tmp_path)


def derived_axis(name: str = "more", **formula: Any) -> Edit:
    return lambda m: m.update(derived_axes={name: formula})


CHANGES: dict[str, tuple[str, Edit]] = {
    "unknown-field": ("surprise", lambda m: m.update(surprise=1)),
    "missing-field": ("opset", lambda m: m.pop("opset")),
    "newer-format": ("format_version", lambda m: m.update(format_version=2)),
    "unknown-graph": ("graphs", lambda m: m["graphs"].update(other=m["graphs"]["plain"])),
    "unknown-type": ("data_type", lambda m: m["graphs"]["plain"]["inputs"][0].update(data_type="float64")),
    "heads-too-many": ("num_heads", lambda m: m.update(num_heads=10**400)),
    "cost-too-large": ("flops_per_pair", lambda m: m["cost"].update(flops_per_pair=2**63)),
    "name-with-a-slash": ("name", lambda m: m.update(name="../tiny")),
    "graph-outside": ("graphs.plain.file", lambda m: m["graphs"]["plain"].update(file="../model.onnx")),
    "axis-derived-from-none": ("derived axis 'more'", derived_axis(axis="other")),
    "axis-derived-by-stride-0": ("derived_axes.more.stride", derived_axis(axis="query_length", stride=0)),
    "axis-derived-by-a-large-scale": ("scale", derived_axis(axis="query_length", scale=10**9)),
    "axis-of-an-input-derived": ("query_length", derived_axis("query_length", axis="query_length")),
    "weights-of-no-output": ("attention_weights", lambda m: m.update(attention_weights="other")),
    "weights-of-other-axes": ("attention_weights", lambda m: m.update(attention_weights="context_vectors")),
    "alias-of-itself": ("differ from the model's name", lambda m: m.update(aliases=[m["name"]])),
    "alias-twice": ("alias 'a/b': must", lambda m: m.update(aliases=["a/b", "a/b"])),
    "alias-of-dots": ("alias '../b': must match", lambda m: m.update(aliases=["../b"])),
    "alias-too-long": ("must match", lambda m: m.update(aliases=["a" * 257])),
    "hash-of-a-file-outside": ("files", lambda m: m["files"].update({"../x": "0"})),
}


@pytest.mark.parametrize(("field", "change"), CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.usefixtures("manifest")
def test_a_manifest_that_breaks_a_rule_is_refused_by_path_and_field(
    field: str, change: Edit, tmp_path: Path
) -> None:
    edit_json(tmp_path / MANIFEST_FILE, change)
    with pytest.raises(ArtifactError) as refusal:
        Manifest.load(tmp_path)
    assert str(tmp_path / MANIFEST_FILE) in str(refusal.value)
    assert field in str(refusal.value)


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json"])
def test_a_file_that_is_missing_changed_or_not_listed_is_refused_by_name(
    name: str, manifest: Manifest, tmp_path: Path
) -> None:
    data = bytearray((tmp_path / name).read_bytes())
    data[-1] ^= 1
    (tmp_path / name).write_bytes(data)
    says = f"{name}: SHA-256 is .* the manifest says {manifest.files[name]}"
    with pytest.raises(ArtifactError, match=says):
        manifest.verify_files(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name}: cannot be read: No such file"):
        manifest.verify_files(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(ArtifactError, match=f"{name}: is not a regular file"):
        manifest.verify_files(tmp_path)
    edit_json(tmp_path / MANIFEST_FILE, lambda values: values["files"].pop(name))
    with pytest.raises(ArtifactError, match=f"lists no hash for {name}"):
        Manifest.load(tmp_path).verify_files(tmp_path)


def test_a_graph_names_onnx_files_that_are_listed(tmp_path: Path, manifest: Manifest) -> None:
    graph = manifest.graphs[GraphKind.PLAIN]
    tensor = b"\x6a\x10\x0a\x08location\x12\x04else"
    (tmp_path / graph.file).write_bytes(b"\x3a\x14\x2a\x12" + tensor)
    digest = {graph.file: file_hash(tmp_path / graph.file)}
    listed = manifest.model_copy(update={"files": manifest.files | digest})
    with pytest.raises(ArtifactError, match="names external data that the manifest does not list: 'else'"):
        listed.verify_files(tmp_path)
    other = {GraphKind.PLAIN: graph.model_copy(update={"file": "parity.json"})}
    with pytest.raises(ArtifactError, match=r"the name of a graph must end with \.onnx"):
        listed.model_copy(update={"graphs": other}).verify_files(tmp_path)


def test_the_rule_of_a_module_is_what_its_configuration_states(manifest: Manifest) -> None:
    stated: dict[str, Any] = {"causal": False, "window": 7}
    for config, pattern in ((stated, (False, 7)), ({}, (True, 0)), ({"window": 2**40}, (True, 0))):
        found = manifest.model_copy(update={"config": config, "causal": True})
        assert found.attention_patterns == (AttentionPattern(*pattern),)
    assert found.model_copy(update={"num_heads": 0}).attention_patterns == ()


def test_a_name_has_letters_digits_and_a_few_signs() -> None:
    for good in ("a", "0", "multi_head.768x12", "A" * 128):
        assert ModelId(good).name == good
    for name in ("", "..", "-a", "a/b", "é", "A" * 129, "tiny\n"):
        with pytest.raises(ValueError, match="must match"):
            ModelId(name)


def test_a_version_is_an_integer_from_1(tmp_path: Path) -> None:
    for version in (0, 2**63, True):
        with pytest.raises(ValueError, match=f"version={version}: must be a positive integer"):
            ModelId("tiny", version)
    for folder in ("2", "10", "011", "x"):
        (tmp_path / "tiny" / folder).mkdir(parents=True)
    assert ModelId("tiny").next_free_version(tmp_path) == 11
