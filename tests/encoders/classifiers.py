"""A reranker and a text classifier of the transformers library with random weights, as artifacts."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.export.encoder import classifier_spec
from attention_serving.model.text_encoder import TextClassifier
from attention_serving.model.text_folders import load
from tests.support import encoders
from tests.support.artifacts import ModelSet

RERANKER, CLASSIFIER = "reranker", "topics"
SIDES = {RERANKER: "right", CLASSIFIER: "left"}
LABELS = {RERANKER: ("relevance",), CLASSIFIER: ("food", "life", "other")}
TOKENS = 64


@cache
def library_model(name: str) -> Any:
    """The model in the library. The reranker tells the two texts of a pair apart; the classifier does not."""
    sizes = {**encoders.SIZES, "num_hidden_layers": 2, "max_position_embeddings": TOKENS}
    labels = dict(enumerate(LABELS[name]))
    options: Any = {**sizes, "id2label": labels, "label2id": {own: at for at, own in labels.items()}}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: Any = transformers.BertForSequenceClassification(transformers.BertConfig(**options))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.8)  # so that types and order of texts count
    return model.eval()


def tokenizer_of(name: str) -> Tokenizer:
    """A token for each byte; the pair template of BERT, or that of RoBERTa."""
    tokenizer = encoders.make_tokenizer()
    pair = "<s> $A </s> $B:1 </s>:1" if name == RERANKER else "<s> $A </s> </s> $B </s>"
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair=pair, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def expected(name: str, *texts: str | Sequence[str], raw: bool = False) -> NDArray[np.float32]:
    """What the library computes for each text or pair by itself, (B, L), before the activation if `raw`."""
    tokenizer, is_reranker = tokenizer_of(name), name == RERANKER
    tokenizer.enable_truncation(TOKENS, strategy="longest_first", direction=SIDES[name])
    rows = []
    for text in texts:
        own = tokenizer.encode(text) if isinstance(text, str) else tokenizer.encode(text[0], text[1])
        types = {"token_type_ids": torch.tensor([own.type_ids])} if is_reranker else {}
        with torch.inference_mode():
            logits: Tensor = library_model(name)(input_ids=torch.tensor([own.ids]), **types).logits
        scores = logits.sigmoid() if is_reranker else logits.softmax(dim=-1)
        rows.append((logits if raw else scores).numpy())
    return np.concatenate(rows)


def export_classifiers(folder: Path) -> None:
    """Both models, from folders as the library saves them."""
    for name in LABELS:
        with TemporaryDirectory() as source:
            library_model(name).save_pretrained(source)
            names = ["input_ids", "attention_mask", *(["token_type_ids"] if name == RERANKER else [])]
            options = {"model_input_names": names, "truncation_side": SIDES[name]}
            encoders.save_tokenizer(tokenizer_of(name), Path(source), **options)
            loaded = load(source)
            assert isinstance(loaded, TextClassifier)
            write_artifact(classifier_spec(loaded, truncates=name != RERANKER), ModelId(name), folder)


CLASSIFIERS = ModelSet("classifiers", [export_classifiers], [Path(__file__), Path(encoders.__file__)])
