"""The text encoders that the tests' server serves: one of each family, and what else is configured."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.export.encoder import encoder_spec
from attention_serving.export.precision import Precision
from attention_serving.model.text_folders import load_encoder
from tests.encoders.heads import COLBERT, FOLDERS, M3, SPLADE, save_folder
from tests.support import encoders
from tests.support.artifacts import ModelSet

SENTENCE, INT8, TRUNCATING = "sentence", "sentence-int8", "truncating"
SETTINGS = {
    "__version__": {"sentence_transformers": "5.0.0"},
    "prompts": {"query": "query: ", "document": ""},
    "similarity_fn_name": "cosine",
}
DIMENSIONS = (8, 16)
SHORT = 12


def export_family(name: str, folder: Path) -> None:
    """A family as the transformers library saves it."""
    with TemporaryDirectory() as source:
        loaded = load_encoder(encoders.save_model(name, Path(source)))
        write_artifact(encoder_spec(loaded), ModelId(name), folder)


def export_sentence(name: str, folder: Path, *, precision: Precision = Precision.FP32) -> None:
    """A BERT with everything that sentence-transformers states.

    TRUNCATING takes few tokens, cuts longer texts and has a default prompt.
    """
    truncates = name == TRUNCATING
    settings = {**SETTINGS, "default_prompt_name": "query" if truncates else None}
    with TemporaryDirectory() as source:
        max_tokens = SHORT if truncates else None
        encoders.save_sentence_model("bert", Path(source), settings=settings, max_tokens=max_tokens)
        spec = encoder_spec(load_encoder(source), dimensions=DIMENSIONS, truncates=truncates)
        write_artifact(spec, ModelId(name), folder, precision=precision)


SOURCES = [Path(__file__), Path(encoders.__file__)]
SENTENCE_MODELS = ModelSet(
    "sentence",
    [partial(export_sentence, SENTENCE)],
    SOURCES,
    ["sentence_repository", "encoder_repository"],
)
# A model with every pooling, which normalises, and one that does not.
POOLED, UNNORMALISED = "pooled", "unnormalised"
POOLINGS = {
    f"pooling_mode_{name}": True
    for name in (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
}


def save_pooled(name: str, folder: Path) -> Path:
    """A BERT of sentence-transformers."""
    pooling = POOLINGS if name == POOLED else None
    return encoders.save_sentence_model("bert", folder, pooling=pooling, normalised=name == POOLED)


def export_pooled(name: str, folder: Path) -> None:
    """The same as an artifact."""
    with TemporaryDirectory() as source:
        write_artifact(encoder_spec(load_encoder(save_pooled(name, Path(source)))), ModelId(name), folder)


POOLED_MODELS = ModelSet("pooled", [partial(export_pooled, name) for name in (POOLED, UNNORMALISED)], SOURCES)
# Families whose graphs differ from those of the others; tests/model/test_encoder.py compares all of them.
FAMILIES = ("bert", "roberta", "mpnet", "modernbert", "qwen3", "clip_text_model")
# Only tests with the marker `thorough` need these.
ENCODERS = ModelSet(
    "encoders",
    [
        *(partial(export_family, name) for name in FAMILIES),
        partial(export_sentence, INT8, precision=Precision.INT8),
        partial(export_sentence, TRUNCATING),
    ],
    SOURCES,
    ["encoder_repository"],
)


def export_heads(name: str, folder: Path) -> None:
    """A sparse or multi-vector encoder, or one with all heads, of `tests.encoders.heads`."""
    with TemporaryDirectory() as source:
        spec = encoder_spec(load_encoder(save_folder(name, Path(source))), truncates=True)
        write_artifact(spec, ModelId(name), folder)


SOURCES_OF_HEADS = [*SOURCES, Path(__file__).with_name("heads.py")]
# One of each kind, and those that only tests with the marker `thorough` need.
HEADS = (SPLADE, COLBERT, M3)
HEAD_MODELS, FURTHER_HEAD_MODELS = (
    ModelSet(name, [partial(export_heads, each) for each in names], SOURCES_OF_HEADS)
    for name, names in (("heads", HEADS), ("further-heads", sorted(FOLDERS.keys() - set(HEADS))))
)
