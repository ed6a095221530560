"""What a folder of an encoder states: honoured, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.encoder_folder.families import FAMILIES
from attention_serving.model.encoder_folder.loading import load_encoder
from tests.support import encoders

Change = Callable[[Path], object]
WEIGHTS, CONFIG = "model.safetensors", "config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return encoders.save_sentence_model("bert", tmp_path / "bert", settings={"prompts": {"query": "q: "}})


def edit(name: str, **changes: Any) -> Change:
    """Changes members of a JSON file; None removes one."""

    def change(folder: Path) -> None:
        path = folder / name
        found = json.loads(path.read_text())
        found = {key: value for key, value in {**found, **changes}.items() if value is not None}
        path.write_text(json.dumps(found))

    return change


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return apply


def modules(*kinds: str) -> Change:
    paths = {"Transformer": "", "Pooling": "1_Pooling"}

    def change(folder: Path) -> None:
        entries = [
            {
                "idx": i,
                "name": str(i),
                "path": paths.get(kind.rpartition(".")[2], f"{i}_{kind}"),
                "type": kind,
            }
            for i, kind in enumerate(kinds)
        ]
        encoders.write_json(folder / "modules.json", entries)

    return change


ST = "sentence_transformers.models."
QUERY = "encoder.layer.1.attention.self.query.weight"
REFUSED: dict[str, tuple[Change, str]] = {
    "missing tensor": (edit_weights(lambda found: found.pop(QUERY)), f"{QUERY}: missing"),
    "wrong shape": (
        edit_weights(lambda found: found.update({QUERY: torch.zeros(32, 16)})),
        rf"{QUERY}: expected shape \(32, 32\), found \(32, 16\)",
    ),
    "extra tensor": (
        edit_weights(lambda found: found.update({"encoder.extra.weight": torch.zeros(2)})),
        "encoder.extra.weight: unexpected",
    ),
    "integers": (
        edit_weights(lambda found: found.update({QUERY: torch.zeros(32, 32, dtype=torch.int32)})),
        f"{QUERY}: has elements of type int32",
    ),
    "fewer layers": (edit(CONFIG, num_hidden_layers=2), r"encoder\.layer\.2\..*: unexpected"),
    "activation": (edit(CONFIG, hidden_act="mish"), "hidden_act='mish' is not supported"),
    "family": (
        edit(CONFIG, model_type="deberta-v2"),
        "model_type 'deberta-v2' is not supported; supported are",
    ),
    "no family": (edit(CONFIG, model_type=None), "model_type is missing"),
    "custom code": (edit(CONFIG, auto_map={"AutoModel": "modeling.Model"}), "auto_map names code"),
    "unknown member": (edit(CONFIG, attention_sinks=3), "attention_sinks not supported"),
    "decoder": (edit(CONFIG, is_decoder=True), "is_decoder=True is not supported"),
    "relative positions": (edit(CONFIG, position_embedding_type="relative_key"), "position_embedding_type"),
    "heads": (edit(CONFIG, num_attention_heads=5), "num_heads=5"),
    "wrong type": (edit(CONFIG, hidden_size="32"), "hidden_size='32' must be an integer"),
    "not JSON": (lambda folder: (folder / CONFIG).write_text("{"), "config.json is not JSON"),
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), "config.json cannot be read"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has neither model.safetensors"),
    "damaged weights": (lambda folder: (folder / WEIGHTS).write_bytes(b"x"), "cannot be read as safetensors"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "damaged tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "tokenizer.json cannot",
    ),
    "small vocabulary": (
        lambda folder: encoders.make_tokenizer(end=900).save(str(folder / "tokenizer.json")),
        "tokenizer.json has the id 900; the model has the ids 0 to 299",
    ),
    "unknown module": (modules(f"{ST}Transformer", f"{ST}Pooling", f"{ST}LSTM"), "LSTM is not supported"),
    "own module": (modules(f"{ST}Transformer", "my.Pooling"), "my.Pooling is code that is not run"),
    "no pooling": (modules(f"{ST}Transformer", f"{ST}Normalize"), "only Transformer, Pooling"),
    "normalised first": (
        modules(f"{ST}Transformer", f"{ST}Pooling", f"{ST}Normalize", f"{ST}Dense"),
        "Normalize must be the last",
    ),
    "width of pooling": (
        edit("1_Pooling/config.json", word_embedding_dimension=64),
        "Pooling is for vectors of width 64; the model has 32",
    ),
    "no mode": (edit("1_Pooling/config.json", pooling_mode_mean_tokens=False), "no pooling is switched on"),
    "unknown mode": (edit("1_Pooling/config.json", pooling_mode_attention=True), "pooling_mode_attention"),
    "prompts are not pooled": (edit("1_Pooling/config.json", include_prompt=False), "include_prompt='false'"),
    "too long": (edit("sentence_bert_config.json", max_seq_length=161), "has positions for 160 tokens"),
    "other task": (edit("sentence_bert_config.json", transformer_task="fill-mask"), "transformer_task"),
    "cut embeddings": (edit("config_sentence_transformers.json", truncate_dim=8), "truncate_dim"),
    "default prompt": (
        edit("config_sentence_transformers.json", default_prompt_name="x"),
        "must be one of query",
    ),
    "unknown setting": (edit("config_sentence_transformers.json", rescale=2), "rescale not supported"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_folder_is_refused_by_name(folder: Path, change: Change, message: str) -> None:
    load_encoder(folder)
    change(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        load_encoder(folder)
    assert str(folder) in str(error.value)


def test_rotary_frequencies_that_are_scaled_are_refused(tmp_path: Path) -> None:
    folder = encoders.save_model("qwen3", tmp_path)
    edit(CONFIG, rope_parameters=None, rope_scaling={"rope_type": "yarn", "factor": 4.0})(folder)
    with pytest.raises(CheckpointError, match="rope_type='yarn' is not supported"):
        load_encoder(folder)


def test_a_tokenizer_that_contradicts_its_configuration_is_refused(tmp_path: Path) -> None:
    from tokenizers.normalizers import BertNormalizer  # noqa: PLC0415

    folder = encoders.save_model("bert", tmp_path)
    tokenizer = encoders.tokenizer_of("bert")
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    encoders.write_json(folder / "tokenizer_config.json", {"do_lower_case": False})
    with pytest.raises(CheckpointError, match=r"do_lower_case=False contradicts tokenizer\.json"):
        load_encoder(folder)


def test_a_folder_that_states_no_pooling_takes_that_of_its_family(tmp_path: Path) -> None:
    folder = encoders.save_model("bert", tmp_path)
    assert load_encoder(folder).module.config.pooling == ("mean",)
    assert load_encoder(folder, pooling="cls").module.config.pooling == ("cls",)
    assert not load_encoder(folder).module.config.normalised


def test_a_pooling_beside_that_of_the_folder_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="the folder states its own"):
        load_encoder(folder, pooling="cls")


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


def test_the_tokenizers_length_holds_if_no_other_is_stated(tmp_path: Path) -> None:
    folder = encoders.save_model("bert", tmp_path)
    encoders.write_json(folder / "tokenizer_config.json", {"model_max_length": 50})
    assert load_encoder(folder).module.config.max_tokens == 50
    encoders.write_json(folder / "tokenizer_config.json", {"model_max_length": 1e30})
    assert load_encoder(folder).module.config.max_tokens == encoders.POSITIONS


def test_a_linear_layer_after_pooling_is_honoured(tmp_path: Path) -> None:
    folder = encoders.save_sentence_model("bert", tmp_path, normalised=False)
    modules(f"{ST}Transformer", f"{ST}Pooling", f"{ST}Dense")(folder)
    dense = folder / f"2_{ST}Dense"
    weight, bias = torch.randn(8, encoders.WIDTH), torch.randn(8)
    function = "torch.nn.modules.activation.Tanh"
    sizes = {"in_features": encoders.WIDTH, "out_features": 8, "bias": True, "activation_function": function}
    encoders.write_json(dense / CONFIG, sizes)
    save_file({"linear.weight": weight, "linear.bias": bias}, dense / WEIGHTS)
    ids = encoders.random_ids("bert", 6)
    with torch.inference_mode():
        found, _, _ = load_encoder(folder).module(torch.tensor([ids]))
    pooled = encoders.expected("bert", encoders.make_model("bert"), ids).embedding
    assert_close(found[0], torch.tanh(weight @ pooled + bias), rtol=1e-4, atol=2e-5)
    save_file({"linear.weight": weight}, dense / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"linear\.bias: missing"):
        load_encoder(folder)


def test_weights_in_several_files(tmp_path: Path) -> None:
    whole = load_encoder(encoders.save_model("llama", tmp_path / "whole")).module.state_dict()
    folder = tmp_path / "parts"
    encoders.make_model("llama").save_pretrained(folder, max_shard_size="20KB")
    encoders.tokenizer_of("llama").save(str(folder / "tokenizer.json"))
    assert not (folder / WEIGHTS).exists()
    for name, parameter in load_encoder(folder).module.state_dict().items():
        assert_close(parameter, whole[name], rtol=0, atol=0)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    (folder / next(iter(places.values()))).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load_encoder(folder)
    encoders.write_json(index, {"weight_map": dict.fromkeys(places, "../elsewhere.safetensors")})
    with pytest.raises(CheckpointError, match=r"must be a \.safetensors file of the folder"):
        load_encoder(folder)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_tensors_of_other_heads_are_skipped(tmp_path: Path, prefix: str) -> None:
    folder = encoders.save_model("bert", tmp_path)
    weights = {f"{prefix}{name}": value for name, value in load_file(folder / WEIGHTS).items()}
    head = "cls.predictions.bias"
    save_file({**weights, head: torch.zeros(2)}, folder / WEIGHTS)
    assert head in load_encoder(folder).skipped


def test_half_precision_weights_are_read(tmp_path: Path) -> None:
    folder = encoders.save_model("bert", tmp_path)
    weights = {name: value.half() for name, value in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS)
    parameters = dict(load_encoder(folder).module.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}


def test_every_family_is_tested() -> None:
    same = {"clip": "clip_text_model", "camembert": "roberta"}
    assert {same.get(name, name) for name in FAMILIES} == set(encoders.CASES)


def test_the_text_tower_of_a_whole_clip(tmp_path: Path) -> None:
    import transformers  # noqa: PLC0415

    text = {**encoders.SIZES, "eos_token_id": encoders.VOCABULARY - 1}
    vision = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 8,
              "patch_size": 4, "intermediate_size": 8}  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    torch.manual_seed(0)
    model: Any = transformers.CLIPModel(config)
    model.eval()
    model.save_pretrained(tmp_path)
    encoders.tokenizer_of("clip_text_model").save(str(tmp_path / "tokenizer.json"))
    ids = torch.tensor([encoders.random_ids("clip_text_model", 9)])
    with torch.inference_mode():
        found, _, _ = load_encoder(tmp_path).module(ids)
        expected = model.get_text_features(input_ids=ids)
    expected = getattr(expected, "pooler_output", expected)
    assert_close(found, expected, rtol=1e-4, atol=2e-5)
