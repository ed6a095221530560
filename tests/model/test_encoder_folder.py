"""What a folder of an encoder states: honoured, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.normalizers import BertNormalizer
from torch.testing import assert_close

from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.encoder_folder.families import FAMILIES
from attention_serving.model.encoder_folder.loading import load_encoder
from tests.support import encoders

Change = Callable[[Path], object]
WEIGHTS, CONFIG = "model.safetensors", "config.json"
POOLING, LENGTHS, SETTINGS = (
    "1_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return encoders.save_sentence_model("bert", tmp_path / "bert", settings={"prompts": {"query": "q: "}})


def edit(name: str, **changes: Any) -> Change:
    """Changes members of a JSON file; None removes one."""

    def change(folder: Path) -> None:
        found = {**json.loads((folder / name).read_text()), **changes}
        encoders.write_json(folder / name, {key: own for key, own in found.items() if own is not None})

    return change


def weights(**changes: torch.Tensor | None) -> Change:
    """Changes tensors, of which __ is a dot; None removes one."""

    def change(folder: Path) -> None:
        found = load_file(folder / WEIGHTS) | {name.replace("__", "."): own for name, own in changes.items()}
        save_file({name: own for name, own in found.items() if own is not None}, folder / WEIGHTS)

    return change


def modules(*kinds: str) -> Change:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    entries = [{"path": paths.get(kind.rpartition(".")[2], "x"), "type": kind} for kind in kinds]
    return lambda folder: encoders.write_json(folder / "modules.json", entries)


def write(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def config(**changes: Any) -> Change:
    return edit(CONFIG, **changes)


ST = "sentence_transformers.models."
TRANSFORMER, POOL = f"{ST}Transformer", f"{ST}Pooling"
QUERY = "encoder__layer__1__attention__self__query__weight"
NAME = QUERY.replace("__", ".")
REFUSED: list[tuple[Change, str]] = [
    (weights(**{QUERY: None}), f"{NAME}: missing"),
    (weights(**{QUERY: torch.zeros(32, 16)}), rf"{NAME}: expected shape \(32, 32\), found \(32, 16\)"),
    (weights(encoder__extra=torch.zeros(2)), "encoder.extra: unexpected"),
    (weights(**{QUERY: torch.zeros(32, 32, dtype=torch.int32)}), f"{NAME}: has elements of type torch.int32"),
    (config(hidden_act="mish"), "hidden_act='mish' is not supported"),
    (config(model_type="deberta-v2"), "model_type 'deberta-v2' is not supported; supported are"),
    (config(model_type=None), "model_type is missing"),
    (config(auto_map={"AutoModel": "modeling.Model"}), "auto_map names code"),
    (config(attention_sinks=3), "attention_sinks not supported"),
    (config(position_embedding_type="relative_key"), "position_embedding_type"),
    (config(num_attention_heads=5), "num_heads=5"),
    (config(layer_norm_eps=-1.0), "layer_norm_eps=-1.0 must be a number from 0"),
    (config(intermediate_size=2**62), "the module would be too large"),
    (lambda folder: (folder / CONFIG).unlink(), "config.json cannot be read"),
    (lambda folder: (folder / WEIGHTS).unlink(), "has neither model.safetensors"),
    (write(WEIGHTS, "x"), "cannot be read as safetensors"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    (write("tokenizer.json", "{}"), "tokenizer.json cannot"),
    (
        lambda folder: encoders.make_tokenizer(end=900).save(str(folder / "tokenizer.json")),
        "tokenizer.json has the id 900; the model has the ids 0 to 299",
    ),
    (modules(TRANSFORMER, POOL, f"{ST}LSTM"), "LSTM is not supported"),
    (modules(TRANSFORMER, "my.Pooling"), "my.Pooling is code that is not run"),
    (modules(TRANSFORMER, f"{ST}Normalize"), "only Transformer, Pooling"),
    (modules(TRANSFORMER, POOL, f"{ST}Normalize", f"{ST}Dense"), "Normalize must be the last"),
    (edit(POOLING, word_embedding_dimension=64), "Pooling is for vectors of width 64; the model has 32"),
    (edit(POOLING, pooling_mode_mean_tokens=False), "no pooling is switched on"),
    (edit(POOLING, pooling_mode_attention=True), "pooling_mode_attention"),
    (edit(POOLING, include_prompt=False), "include_prompt='false'"),
    (edit(LENGTHS, max_seq_length=161), "has positions for 160 tokens"),
    (edit(SETTINGS, truncate_dim=8), "truncate_dim"),
    (edit(SETTINGS, default_prompt_name="x"), "must be one of query"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_folder_is_refused_by_name(folder: Path, change: Change, message: str) -> None:
    change(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        load_encoder(folder)
    assert str(folder) in str(error.value)


def test_rotary_frequencies_that_are_scaled_are_refused(tmp_path: Path) -> None:
    folder = encoders.save_model("qwen3", tmp_path)
    config(rope_parameters=None, rope_scaling={"rope_type": "yarn", "factor": 4.0})(folder)
    with pytest.raises(CheckpointError, match="rope_type='yarn' is not supported"):
        load_encoder(folder)


def test_a_tokenizer_that_contradicts_its_configuration_is_refused(folder: Path) -> None:
    tokenizer = encoders.tokenizer_of("bert")
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    encoders.write_json(folder / "tokenizer_config.json", {"do_lower_case": False})
    with pytest.raises(CheckpointError, match=r"do_lower_case=False contradicts tokenizer\.json"):
        load_encoder(folder)


def test_a_folder_that_states_little_takes_the_pooling_of_its_family_and_the_tokenizers_length(
    tmp_path: Path,
) -> None:
    folder = encoders.save_model("bert", tmp_path)
    encoders.write_json(folder / "tokenizer_config.json", {"model_max_length": 50})
    found = load_encoder(folder).module.config
    assert (found.pooling, found.max_tokens) == (("mean",), 50)
    assert load_encoder(folder, pooling="cls").module.config.pooling == ("cls",)
    with pytest.raises(CheckpointError, match="the folder states its own"):
        load_encoder(encoders.save_sentence_model("bert", tmp_path), pooling="cls")


def test_what_sentence_transformers_states_is_honoured(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"}
    folder = encoders.save_sentence_model("bert", tmp_path, settings=settings, max_tokens=40)
    edit("sentence_bert_config.json", do_lower_case=True)(folder)
    edit(CONFIG, matryoshka_dimensions=[16, 8])(folder)
    loaded = load_encoder(folder)
    assert loaded.prompts == settings["prompts"]
    assert (loaded.default_prompt, loaded.dimensions) == ("query", (8, 16))
    assert (loaded.module.config.max_tokens, loaded.module.config.normalised) == (40, True)
    assert loaded.tokenizer.encode("ABC").ids == encoders.tokenizer_of("bert").encode("abc").ids


def test_a_linear_layer_after_pooling_is_honoured(tmp_path: Path) -> None:
    folder = encoders.save_sentence_model("bert", tmp_path, normalised=False)
    modules(TRANSFORMER, POOL, f"{ST}Dense")(folder)
    weight, bias = torch.randn(8, encoders.WIDTH), torch.randn(8)
    sizes = {"in_features": encoders.WIDTH, "out_features": 8, "bias": True}
    function = {"activation_function": "torch.nn.modules.activation.Tanh"}
    encoders.write_json(folder / "2_Dense" / CONFIG, sizes | function)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / WEIGHTS)
    ids = encoders.random_ids("bert", 6)
    with torch.inference_mode():
        found, _, _ = load_encoder(folder).module(torch.tensor([ids]))
    pooled = encoders.expected("bert", encoders.make_model("bert"), ids).embedding
    assert_close(found[0], torch.tanh(weight @ pooled + bias), rtol=1e-4, atol=2e-5)
    save_file({"linear.weight": weight}, folder / "2_Dense" / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"2_Dense: linear\.bias: missing"):
        load_encoder(folder)


def test_weights_in_several_files(tmp_path: Path) -> None:
    whole = load_encoder(encoders.save_model("llama", tmp_path)).module.state_dict()
    (tmp_path / WEIGHTS).unlink()
    encoders.make_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    for name, parameter in load_encoder(tmp_path).module.state_dict().items():
        assert_close(parameter, whole[name], rtol=0, atol=0)
    index = tmp_path / f"{WEIGHTS}.index.json"
    places = json.loads(index.read_text())["weight_map"]
    encoders.write_json(index, {"weight_map": dict.fromkeys(places, "../elsewhere.safetensors")})
    with pytest.raises(CheckpointError, match=r"must be a \.safetensors file of the folder"):
        load_encoder(tmp_path)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_tensors_of_other_heads_are_skipped_and_half_precision_is_read(tmp_path: Path, prefix: str) -> None:
    folder = encoders.save_model("bert", tmp_path)
    stored = {f"{prefix}{name}": value.half() for name, value in load_file(folder / WEIGHTS).items()}
    head = "cls.predictions.bias"
    save_file({**stored, head: torch.zeros(2)}, folder / WEIGHTS)
    loaded = load_encoder(folder)
    assert head in loaded.skipped
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.float32}


def test_every_family_is_tested() -> None:
    same = {"clip": "clip_text_model", "camembert": "roberta"}
    assert {same.get(name, name) for name in FAMILIES} == set(encoders.CASES)


def test_the_text_tower_of_a_whole_clip(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 8,
              "patch_size": 4, "intermediate_size": 8}  # fmt: skip
    text = {**encoders.SIZES, "eos_token_id": encoders.VOCABULARY - 1}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    model: Any = transformers.CLIPModel(config)
    model.eval().save_pretrained(tmp_path)
    encoders.tokenizer_of("clip_text_model").save(str(tmp_path / "tokenizer.json"))
    ids = torch.tensor([encoders.random_ids("clip_text_model", 9)])
    with torch.inference_mode():
        found, _, _ = load_encoder(tmp_path).module(ids)
        expected = model.get_text_features(input_ids=ids)
    assert_close(found, getattr(expected, "pooler_output", expected), rtol=1e-4, atol=2e-5)
