"""Encoders read from folders, against the libraries that write and read them."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import Tensor
from torch.testing import assert_close

from attention_serving.export.encoder import encoder_spec
from attention_serving.export.errors import ExportError
from attention_serving.export.options import Reference
from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.text_encoder import TextEncoder
from attention_serving.model.text_folders import load, load_encoder
from tests.support import encoders
from tests.support.artifacts import edit_json

RTOL, ATOL = 1e-4, 2e-5
TEXTS = ["Life is short", "LIFE is <s>", "", "a b  c\td"]
model_of = cache(encoders.make_model)


def run(encoder: TextEncoder, sequences: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings, token vectors and weights; those of padding in a batch of several sequences included."""
    longest = max(map(len, sequences))
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences])
    lengths = torch.tensor(list(map(len, sequences))) if len(sequences) > 1 else None
    with torch.inference_mode():
        found: tuple[Tensor, Tensor, Tensor] = encoder(
            padded, lengths, return_tokens=True, return_weights=True
        )[:3]
        alone, *_ = encoder(padded, lengths)
    assert_close(alone, found[0], rtol=RTOL, atol=ATOL)  # by the fused kernel, which returns no weights
    return found


@pytest.mark.parametrize("name", encoders.CASES)
def test_every_output_equals_the_library(tmp_path: Path, name: str) -> None:
    case = encoders.CASES[name]
    encoder, lengths = load_encoder(encoders.save_model(name, tmp_path)), (9, 1, 40, case.max_tokens)
    assert encoder.supports_padding
    assert (encoder.max_tokens, encoder.pooling) == (case.max_tokens, (case.pooling,))
    sequences = [encoders.random_ids(name, length, seed=3) for length in lengths]
    for batch in (sequences, sequences[:1]):
        embeddings, tokens, weights = run(encoder, batch)
        for index, ids in enumerate(batch):
            expected, count = encoders.expected(name, model_of(name), ids), len(ids)
            assert_close(embeddings[index], expected.embedding, rtol=RTOL, atol=ATOL)
            assert_close(tokens[index, :count], expected.tokens, rtol=RTOL, atol=ATOL)
            assert_close(weights[index, :, :, :count, :count], expected.weights, rtol=RTOL, atol=ATOL)
            assert not tokens[index, count:].any()
            assert not weights[index, :, :, count:].any()


Change = Callable[[Path], Any]


def config_of(file: str, **members: object) -> Change:
    """Sets members of a JSON file of a folder."""

    def change(folder: Path) -> None:
        path = folder / file
        before = json.loads(path.read_bytes()) if path.exists() else {}
        encoders.write_json(path, before | members)

    return change


def tokenizer_of(**members: object) -> Change:
    """Sets members of the configuration of the tokenizer."""
    return config_of("tokenizer_config.json", **members)


def pooling_of(**members: object) -> Change:
    """Replaces the configuration of the pooling."""
    given = {"word_embedding_dimension": encoders.WIDTH, **members}
    return lambda folder: encoders.write_json(folder / "1_Pooling/config.json", given)


def further(*kinds: str) -> Change:
    """Adds modules, with weights where they have some."""

    def change(folder: Path) -> None:
        entries = json.loads((folder / "modules.json").read_bytes())
        for kind in kinds:
            size = encoders.WIDTH
            made = {"Dense": (size, size), "LayerNorm": (size,), "Dropout": (0.1,), "Normalize": ()}[kind]
            module, path = getattr(modules, kind)(*made), f"{len(entries)}_{kind}"
            (folder / path).mkdir()
            module.save(str(folder / path))
            written = {"idx": len(entries), "name": str(len(entries)), "path": path}
            entries.append({**written, "type": f"sentence_transformers.models.{kind}"})
        encoders.write_json(folder / "modules.json", entries)

    return change


def without(file: str, name: str) -> Change:
    """Removes a member of a JSON file."""
    return lambda folder: edit_json(folder / file, lambda members: members.pop(name))


def dense_without_function(folder: Path) -> None:
    """A linear layer whose configuration does not name its function, which is then Tanh."""
    further("Dense")(folder)
    without("2_Dense/config.json", "activation_function")(folder)


def truncating(folder: Path) -> None:
    """A tokenizer.json that was saved while it cut and padded."""
    tokenizer = encoders.tokenizer_of("bert")
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7, pad_id=1, pad_token="<pad>")  # noqa: S106
    encoders.save_tokenizer(tokenizer, folder)


TOKEN = {"content": "[NEW]", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
         "special": True}  # fmt: skip
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
# What a folder may state beside the usual: all of it changes results, or is easily taken to.
STATED: dict[str, Change] = {
    "nothing": lambda _folder: None,
    "a truncation left in tokenizer.json": truncating,
    "a cut on the left": tokenizer_of(truncation_side="left"),
    "model_max_length": tokenizer_of(model_max_length=7),
    "a length by another name": config_of("sentence_roberta_config.json", max_seq_length=9),
    "a token added in tokenizer_config.json": tokenizer_of(added_tokens_decoder={"7": TOKEN}),
    "additional_special_tokens": tokenizer_of(additional_special_tokens=["short"]),
    "special_tokens_map.json": config_of("special_tokens_map.json", additional_special_tokens=["Life"]),
    "added_tokens.json": config_of("added_tokens.json", short=8),
    "do_lower_case of sentence-transformers": config_of("sentence_bert_config.json", do_lower_case=True),
    "do_lower_case": tokenizer_of(do_lower_case=True),
    "add_prefix_space": tokenizer_of(add_prefix_space=True),
    "a beginning and an end": tokenizer_of(add_bos_token=True, add_eos_token=True, **ENDS),
    "another mode beside old flags": pooling_of(pooling_mode="cls", pooling_mode_mean_tokens=True),
    "a list of modes": pooling_of(pooling_mode=["cls", "mean"]),
    "several old flags": pooling_of(pooling_mode_max_tokens=True, pooling_mode_weightedmean_tokens=True),
    "the root of the length": pooling_of(pooling_mode="mean_sqrt_len_tokens"),
    "the last token": pooling_of(pooling_mode="lasttoken"),
    "no use of prompts": pooling_of(pooling_mode="mean", include_prompt=False),
    "further modules": further("Dense", "LayerNorm", "Dropout", "Normalize"),
    "a linear layer without a function": dense_without_function,
    "truncate_dim": config_of("config_sentence_transformers.json", truncate_dim=8),
    "gelu_python": config_of("config.json", hidden_act="gelu_python"),
    "add_pooling_layer": config_of("config.json", add_pooling_layer=False, attn_implementation="eager"),
}


@pytest.mark.parametrize("stated", STATED)
def test_what_a_folder_states_has_the_effect_that_it_has_in_the_library(tmp_path: Path, stated: str) -> None:
    folder = encoders.save_sentence_model("bert", tmp_path, normalised=stated == "nothing")
    STATED[stated](folder)
    encoder = load_encoder(folder)
    reference = encoder_spec(encoder).reference  # which compares the token ids of 64 texts
    assert reference.startswith("sentence-transformers 6.")
    library: Any = SentenceTransformer(str(folder), device="cpu")
    expected = library.encode(TEXTS)
    for text, own in zip(TEXTS, expected, strict=True):
        ids = encoder.tokenizer.encode(text).ids[: encoder.max_tokens]
        with torch.inference_mode():
            served = encoder(torch.tensor([ids]))[0][0].numpy()
        if len(encoder.tokenizer.encode(text).ids) <= (encoder.max_tokens or 1_000):
            np.testing.assert_allclose(served, own, rtol=RTOL, atol=ATOL)


def weights_lack_a_part(folder: Path) -> None:
    """Removes a tensor from the weights."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_prompts(folder: Path) -> None:
    """A model whose pooling leaves its prompts out."""
    pooling_of(pooling_mode="mean", include_prompt=False)(folder)
    config_of("config_sentence_transformers.json", prompts={"query": "q: "})(folder)


REFUSED: dict[str, tuple[Change, str]] = {
    "a missing tensor": (weights_lack_a_part, r"lack encoder\.layer\.1\.output\.dense\.weight"),
    "prompts that are left out": (with_prompts, "include_prompt: false"),
    "special tokens that are split": (tokenizer_of(split_special_tokens=True), "split_special_tokens"),
    "code": (
        lambda folder: encoders.write_json(
            folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": "mine.Module"}]
        ),
        "trust_remote_code",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "cannot be read"),
    "JSON that is none": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_cannot_be_served_are_refused_by_name(tmp_path: Path, case: str) -> None:
    change, says = REFUSED[case]
    folder = encoders.save_sentence_model("bert", tmp_path)
    change(folder)
    with pytest.raises(CheckpointError, match=says):
        load_encoder(folder)


def test_a_pooling_belongs_to_a_folder_without_one_and_folders_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        load(tmp_path / "absent")
    folder = encoders.save_sentence_model("bert", tmp_path / "a")
    with pytest.raises(CheckpointError, match="the folder states its own"):
        load(folder, pooling="cls")
    plain = load_encoder(encoders.save_model("bert", tmp_path / "b"), pooling="cls")
    assert plain.pooling == ("cls",)
    with pytest.raises(ExportError, match=r"modules\.json"):
        encoder_spec(plain, reference=Reference.SENTENCE_TRANSFORMERS)


def test_an_installation_for_modules_only_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(CheckpointError, match=r"attention-serving\[encoders\]"):
        load_encoder(tmp_path)


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = encoders.save_model("bert", tmp_path / "base")
    model = peft.get_peft_model(
        encoders.make_model("bert"), peft.LoraConfig(target_modules=["query", "value"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    model.save_pretrained(tmp_path)
    config_of("adapter_config.json", base_model_name_or_path=str(base))(tmp_path)
    ids = torch.tensor([encoders.random_ids("bert", 7)])
    with torch.inference_mode():
        expected = model.eval()(input_ids=ids).last_hidden_state.mean(dim=1)
        assert_close(load_encoder(tmp_path)(ids)[0], expected, rtol=RTOL, atol=ATOL)
