"""Serves a text encoder of your own, and compares it with PyTorch.

    python -m examples.bring_your_bert FOLDER --name my-bert
    python -m examples.bring_your_bert           # makes a tiny BERT with random weights in place of FOLDER

FOLDER is what `save_pretrained` of transformers or `save` of sentence-transformers writes; nothing is
downloaded. The encoder is exported as by `python -m export --encoder FOLDER --name my-bert --out
model_repository`, served, and asked for embeddings and token vectors. The other examples can use it then:

    python -m server --model-repository model_repository --http-port 8000

Exit status: 0 if the differences are small; 1 if they are not, or if FOLDER cannot be exported.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from attention_client import AttentionClient
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from attention_serving.artifact.names import ModelId
from attention_serving.export import ExportError
from attention_serving.export.artifact import write_artifact
from attention_serving.export.encoder import encoder_spec
from attention_serving.model.text_encoder import TextEncoder
from attention_serving.model.text_folders import load_encoder
from scripts.local_server import serving

TEXTS = ["Life is short, eat dessert first", "Das Leben ist kurz", "short"]
TOLERANCE = 1e-4


def make_tiny_bert(folder: Path) -> Path:
    """Writes a BERT of bytes, always with the same random weights, as Hugging Face lays it out."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[CLS]", "[SEP]", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=len(vocabulary), intermediate_size=64, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    names: Any = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    reader: Any = transformers.PreTrainedTokenizerFast
    reader(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


@torch.inference_mode()
def compare(client: AttentionClient, name: str, loaded: TextEncoder, folder: Path) -> float:
    """Prints the largest differences of served values from PyTorch's, and returns the larger one."""
    library = transformers.AutoModel.from_pretrained(folder).eval()
    model = loaded.library
    prompt = model.prompts[model.default_prompt_name] if model and model.default_prompt_name else ""
    embeddings = client.embed(name, TEXTS)  # (texts, d)
    tokens = client.attend_text(name, TEXTS).context_vectors  # (T, d) for each text
    differences = []
    for text, embedding, vectors in zip(TEXTS, embeddings, tokens, strict=True):
        ids = torch.tensor([loaded.tokenizer.encode(prompt + text).ids])  # (1, T)
        pairs = (embedding, loaded(ids)[0][0]), (vectors, library(ids).last_hidden_state[0])
        differences.append([np.abs(served - eager.numpy()).max() for served, eager in pairs])
    of_embeddings, of_tokens = np.max(differences, axis=0)
    print(f"{len(TEXTS)} embeddings of width {embeddings.shape[1]}")
    print(f"largest difference of embeddings from eager PyTorch: {of_embeddings:.1e}")
    print(f"largest difference of token vectors from transformers: {of_tokens:.1e}")
    return float(max(of_embeddings, of_tokens))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exports, serves and compares; returns the exit status."""
    parser = argparse.ArgumentParser(description="Serve a text encoder, and compare it with PyTorch.")
    parser.add_argument("folder", type=Path, nargs="?", help="of the encoder (default: a tiny one is made)")
    parser.add_argument("--name", default="my-bert", help="name of the model (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("model_repository"), help="(default: %(default)s)")
    parser.add_argument("--replace", action="store_true", help="replace another model of this name")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or make_tiny_bert(Path(temporary) / "bert")
        try:
            loaded = load_encoder(folder)
            path, _ = write_artifact(
                encoder_spec(loaded), ModelId(options.name), options.out, replace=options.replace
            )
        except (ValueError, ExportError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"exported to {path}")
        only = ("--model-control=explicit", f"--load-model={options.name}")
        log = Path(temporary) / "log"
        with serving(options.out, log, *only) as server, AttentionClient(server.target) as client:
            return int(compare(client, options.name, loaded, folder) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
