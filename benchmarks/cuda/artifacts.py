"""Makes what the steps need: artifacts, and fixed inputs with the answers of eager PyTorch.

Weights are rounded to bfloat16, and the layers of an encoder are rotations of one layer: they are packed into
a small part of their size, and no two layers share memory.
"""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

from attention_serving.artifact.golden import GoldenCase, golden_tensors
from attention_serving.artifact.manifest import BATCH_AXIS, KEY_LENGTHS, GraphKind
from attention_serving.artifact.names import ModelId
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.artifact import write_artifact
from attention_serving.export.encoder import encoder_spec
from attention_serving.export.parity import SEED, grid_cases
from attention_serving.export.precision import TOLERANCES, Precision
from attention_serving.export.signature import (
    AttentionModule,
    ExportSpec,
    Signature,
    attention_spec,
    random_inputs,
    run_eager,
)
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import build_preset
from attention_serving.model.text_folders import load_encoder
from benchmarks.cuda.settings import BASE_ENCODER, CAUSAL_CROSS, SMALL_ENCODER, TINY_ENCODER, Settings, word
from benchmarks.processes import cores

Module = TypeVar("Module", bound=nn.Module)
FIXED_GRID = ((1, 1, 1), (1, 2, 7), (4, 7, 7), (3, 9, 12), (2, 33, 65), (1, 64, 64))
# The fixed lengths are 0, 1 … 9, of as many sequences.
LONGEST_FIXED = 9
VOCABULARY, POSITIONS, SPECIAL = 2048, 514, ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
SPREAD = 0.05
"""Standard deviation of an encoder's weights, at which attention differs from an average."""
SIZES = {  # width, layers, heads, width of the feed-forward part
    TINY_ENCODER: (32, 2, 4, 64),
    SMALL_ENCODER: (384, 6, 12, 1536),
    BASE_ENCODER: (768, 12, 12, 3072),
}


def prepare(settings: Settings, report_progress: Callable[[str], None]) -> None:
    """Makes everything that is not there."""
    missing = settings.missing
    for name in dict.fromkeys(name for name, _ in missing if name in SIZES):
        make_encoder(name, settings.cache / "encoders" / name)
    with ProcessPoolExecutor(cores(), get_context("spawn")) as pool:
        jobs = {case: pool.submit(make, settings, *case, fixed=fixed) for case, fixed in missing.items()}
        for (name, precision), job in jobs.items():
            report_progress(f"made: {name}-{precision} {job.result()}".rstrip())


def make(settings: Settings, name: str, precision: Precision, *, fixed: bool) -> str:
    """Exports a module, with its fixed cases; returns why that fails."""
    torch.set_num_threads(1)
    model, file = ModelId(f"{name}-{precision}"), settings.fixed_file(name, precision)
    spec = _spec(settings, name)
    tolerance = module_tolerance(spec.module, precision)
    try:
        write_artifact(spec, model, settings.models, precision=precision, tolerance=tolerance, replace=True)
    except Exception as error:  # of many types, some of which cannot be sent to another process
        return f"not exported: {str(error)[:300]}"
    if fixed:
        file.parent.mkdir(parents=True, exist_ok=True)
        cases = [case for signature in spec.signatures for case in fixed_cases(spec.module, signature)]
        save_file(dict(golden_tensors(cases)), file)
    return ""


def fixed_cases(module: nn.Module, signature: Signature) -> Iterator[GoldenCase]:
    """Random inputs of a graph with the answers of eager PyTorch; also for lengths 0, 1 … 9."""
    yield from (case for _, case in grid_cases(module, signature, FIXED_GRID))
    if signature.kind is GraphKind.LENGTHS:
        sizes = dict.fromkeys(signature.axes, LONGEST_FIXED) | {BATCH_AXIS: LONGEST_FIXED + 1}
        inputs = random_inputs(signature, sizes, np.random.default_rng(SEED))
        inputs[KEY_LENGTHS] = np.arange(LONGEST_FIXED + 1).clip(signature.least_key_length)
        yield GoldenCase(signature.kind, inputs, run_eager(module, signature, inputs))


def module_tolerance(module: nn.Module, precision: Precision) -> Tolerance | None:
    """Twice the usual one if scores are not scaled, which amplifies their rounding; else None."""
    config: Any = getattr(module, "config", None)
    if precision is Precision.FP32 or getattr(config, "scale", None) != 1:
        return None
    return TOLERANCES[precision].model_copy(
        update={"rtol": 2 * TOLERANCES[precision].rtol, "atol": 2 * TOLERANCES[precision].atol}
    )


def _spec(settings: Settings, name: str) -> ExportSpec:
    if name in SIZES:
        return encoder_spec(load_encoder(settings.cache / "encoders" / name))
    return attention_spec(build(name), name)


def build(name: str) -> AttentionModule:
    """An attention module in eager PyTorch, in evaluation mode and fp32, always with the same weights."""
    if name == CAUSAL_CROSS:
        torch.manual_seed(0)
        config = AttentionConfig(d_query=64, num_heads=4, cross=True, causal=True)
        return _round(MultiHeadAttention(config).eval())
    return _round(build_preset(name))


@torch.no_grad()
def _round(module: Module) -> Module:
    for parameter in module.parameters():
        parameter.copy_(parameter.bfloat16())
    return module


@torch.no_grad()
def make_encoder(name: str, folder: Path) -> None:
    """Saves a BERT of random weights in fp16, as sentence-transformers does, unless it is there.

    A text of n words of `word` has n + 2 tokens.
    """
    import transformers  # noqa: PLC0415 - each takes seconds
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415
    from sentence_transformers.models import Normalize, Pooling, Transformer  # noqa: PLC0415
    from tokenizers import Tokenizer, pre_tokenizers, processors  # noqa: PLC0415
    from tokenizers.models import WordLevel  # noqa: PLC0415

    if (folder / "modules.json").exists():
        return
    width, layers, heads, inner = SIZES[name]
    names = [*SPECIAL, *(word(number) for number in range(VOCABULARY - len(SPECIAL)))]
    tokenizer = Tokenizer(
        WordLevel({text: number for number, text in enumerate(names)}, unk_token=SPECIAL[3])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing((SPECIAL[2], 2), (SPECIAL[1], 1))
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=POSITIONS,
        initializer_range=SPREAD,
    )
    torch.manual_seed(0)
    model: Any = _round(transformers.BertModel(config))
    first = dict(model.encoder.layer[0].named_parameters())
    for number, layer in enumerate(model.encoder.layer):
        for key, parameter in layer.named_parameters():
            parameter.copy_(first[key].roll(number, 0))
    plain = folder / "transformer"
    model.half().save_pretrained(plain)
    reader: Any = transformers.PreTrainedTokenizerFast
    special = dict(zip(("pad_token", "cls_token", "sep_token", "unk_token"), SPECIAL, strict=True))
    reader(tokenizer_object=tokenizer, model_max_length=POSITIONS - 2, **special).save_pretrained(plain)
    parts = [Transformer(str(plain)), Pooling(width), Normalize()]
    library: Any = SentenceTransformer(modules=parts, device="cpu")
    library.half().save(str(folder), create_model_card=False)
    shutil.rmtree(plain)
