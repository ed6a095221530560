"""A reranker and a text classifier of the transformers library with random weights, as artifacts."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from attention_serving.artifact.encoder import SCORES, ClassifierFacts
from attention_serving.artifact.manifest import BATCH_AXIS, KEY_LENGTHS, TOKEN_TYPES, GraphKind
from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.export.encoder import TOKEN_IDS
from attention_serving.export.signature import QUERY_AXIS, ExportSpec, Signature, tensor
from tests.support import encoders
from tests.support.artifacts import ModelSet

RERANKER, CLASSIFIER = "reranker", "topics"
LABELS = {RERANKER: ("relevance",), CLASSIFIER: ("food", "life", "other")}
TOKENS = 64


@cache
def library_model(name: str) -> Any:
    """The model in the library. The reranker tells the two texts of a pair apart; the classifier does not."""
    sizes = {**encoders.SIZES, "num_hidden_layers": 2, "max_position_embeddings": TOKENS}
    options: Any = {**sizes, "num_labels": len(LABELS[name]), "attn_implementation": "eager"}
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


def expected(name: str, *texts: str | Sequence[str]) -> NDArray[np.float32]:
    """What the library computes for each text or pair by itself, (B, L)."""
    tokenizer, scores = tokenizer_of(name), Scores(name)
    tokenizer.enable_truncation(TOKENS, strategy="longest_first")
    found = [
        tokenizer.encode(own) if isinstance(own, str) else tokenizer.encode(own[0], own[1]) for own in texts
    ]
    with torch.inference_mode():
        rows = [scores(torch.tensor([own.ids]), torch.tensor([own.type_ids])) for own in found]
    return np.concatenate([row.numpy() for row in rows])


class Scores(nn.Module):
    """The library's model with the activation."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model, self.is_reranker = library_model(name), name == RERANKER

    def forward(
        self, token_ids: Tensor, token_types: Tensor | None = None, key_lengths: Tensor | None = None
    ) -> Tensor:
        mask = torch.ones_like(token_ids)
        if key_lengths is not None:
            mask = (torch.arange(token_ids.shape[1]) < key_lengths[:, None]).long()  # (B, T)
        found = self.model(input_ids=token_ids, attention_mask=mask, token_type_ids=token_types)
        logits: Tensor = found.logits  # (B, L)
        return logits.sigmoid() if self.is_reranker else logits.softmax(dim=-1)


def spec_of(name: str) -> ExportSpec:
    """What is exported of a model."""
    is_reranker, tokenizer = name == RERANKER, tokenizer_of(name)
    inputs = [tensor(TOKEN_IDS, "int64", BATCH_AXIS, QUERY_AXIS, exclusive_upper_bound=encoders.VOCABULARY)]
    if is_reranker:
        inputs.append(tensor(TOKEN_TYPES, "int64", BATCH_AXIS, QUERY_AXIS, exclusive_upper_bound=2))
    facts = ClassifierFacts(
        family="bert",
        labels=LABELS[name],
        activation="sigmoid" if is_reranker else "softmax",
        truncates=not is_reranker,
        row_elements=6 * encoders.WIDTH,
    )
    return ExportSpec(
        module=Scores(name),
        signatures=tuple(
            Signature(
                kind=kind,
                inputs=(*inputs, *further),
                outputs=(tensor(SCORES, "float32", BATCH_AXIS, len(LABELS[name])),),
                least_key_length=1,
                max_lengths={QUERY_AXIS: TOKENS},
            )
            for kind, further in (
                (GraphKind.PLAIN, ()),
                (GraphKind.LENGTHS, (tensor(KEY_LENGTHS, "int64", BATCH_AXIS),)),
            )
        ),
        description="a text classifier of the tests",
        identity={"tokenizer": tokenizer.to_str()},
        num_heads=encoders.HEADS,
        tokenizer=tokenizer,
        classifier=facts,
    )


def export_classifiers(folder: Path) -> None:
    """Both models."""
    for name in LABELS:
        write_artifact(spec_of(name), ModelId(name), folder)


CLASSIFIERS = ModelSet("classifiers", [export_classifiers], [Path(__file__), Path(encoders.__file__)])
