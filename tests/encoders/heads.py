"""Folders of sparse and multi-vector encoders with random weights, as the reference library writes them.

Nothing is trained, so that a folder is the same wherever it is made.
"""

import string
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Normalize, Router, Transformer
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import (
    SparseAutoEncoder,
    SparseStaticEmbedding,
    SpladePooling,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

from attention_serving.export.reference import TEXTS

WIDTH, LAYERS, HEADS, POSITIONS, MAX_TOKENS, COLUMNS = 32, 2, 4, 160, 128, 16
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
NAMES = ("cls", "pad", "sep", "unk", "mask")
SPECIAL_TOKENS = {f"{name}_token": token for name, token in zip(NAMES, SPECIAL, strict=True)}
SPECIAL_TOKENS |= {"bos_token": "<s>", "eos_token": "</s>"}
WORDS = [word for word, _ in sorted(Counter(" ".join(TEXTS).lower().split()).items(), key=lambda pair: pair)]
LETTERS = sorted(set("".join(WORDS)) | set(string.punctuation))
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
}
DISTILBERT = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 48, "pad_token_id": 1}
MODERNBERT = {
    "local_attention": 8,
    "bos_token_id": 0,
    "cls_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
}


def wordpiece() -> Tokenizer:
    """Words in lower case, and parts of other words."""
    pieces = dict.fromkeys([*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS])
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL[3]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def byte_pairs() -> Tokenizer:
    """Bytes, and the beginnings of words after a space."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = dict.fromkeys([*SPECIAL, *sorted(splitter.alphabet())])
    merges = dict[tuple[str, str], None]()
    for word in WORDS:
        ((encoded, _),) = splitter.pre_tokenize_str(f" {word}")[:1]
        for end in range(2, len(encoded) + 1):
            merges[encoded[: end - 1], encoded[end - 1]] = None
            pieces[encoded[:end]] = None
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [*merges]))
    tokenizer.pre_tokenizer = splitter
    return tokenizer


def unigram() -> Tokenizer:
    """Words after a space, and letters."""
    pieces = [*SPECIAL, "▁", *LETTERS, *dict.fromkeys(f"▁{word}" for word in WORDS)]
    scores = [(piece, 0.0 if piece in SPECIAL else -10.0 - len(piece) / 8) for piece in dict.fromkeys(pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=SPECIAL.index("<unk>")))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def save_model(
    folder: Path, tokenizer: Tokenizer, model: str, sizes: dict[str, Any], *, spare: int = 0
) -> str:
    """A folder of the transformers library: a model of a class with random weights, and its tokenizer.

    The model has some token ids more than the tokenizer.
    """
    ends = [(token, SPECIAL.index(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    reader = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        **SPECIAL_TOKENS,
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
    )
    family = model.removesuffix("ForMaskedLM").removesuffix("Model")
    config = getattr(transformers, f"{family}Config")(vocab_size=len(reader) + spare, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made = getattr(transformers, model)(config)
        for name, parameter in made.named_parameters():
            if "norm" not in name.lower():
                nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(folder)
    reader.save_pretrained(folder)
    return str(folder)


def save_splade(folder: Path, source: Path) -> None:
    """The largest weights of a BERT."""
    masked = save_model(source, wordpiece(), "BertForMaskedLM", SIZES)
    modules = [Transformer(masked, transformer_task="fill-mask"), SpladePooling("max")]
    SparseEncoder(modules=modules).save_pretrained(str(folder))


def save_splade_sum(folder: Path, source: Path) -> None:
    """The sums of weights of a RoBERTa with prompts, a bound and token ids that the tokenizer lacks."""
    masked = save_model(source, byte_pairs(), "RobertaForMaskedLM", SIZES, spare=5)
    modules = [Transformer(masked, transformer_task="fill-mask"), SpladePooling("sum", "log1p_relu")]
    prompts = {"query": "ask: ", "document": "text: "}
    SparseEncoder(modules=modules, max_active_dims=24, prompts=prompts).save_pretrained(str(folder))


def save_inference_free(folder: Path, source: Path) -> None:
    """Documents of a DistilBERT, and queries without a model."""
    masked = save_model(source, wordpiece(), "DistilBertForMaskedLM", DISTILBERT)
    documents = Transformer(masked, transformer_task="fill-mask")
    weights = torch.linspace(0, 3, len(documents.tokenizer))
    router = Router.for_query_document(
        query_modules=[SparseStaticEmbedding(documents.tokenizer, weight=weights, frozen=True)],
        document_modules=[documents, SpladePooling("max", "log1p_relu")],
    )
    SparseEncoder(modules=[router]).save_pretrained(str(folder))


def save_autoencoder(folder: Path, source: Path) -> None:
    """The latents of the embeddings of an XLM-R."""
    plain = save_model(source, unigram(), "XLMRobertaModel", SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        autoencoder = SparseAutoEncoder(input_dim=WIDTH, hidden_dim=96, k=12, k_aux=16)
        nn.init.normal_(autoencoder.latent_bias, std=0.1)
    modules = [Transformer(plain), Pooling(WIDTH, "mean"), autoencoder]
    SparseEncoder(modules=modules).save_pretrained(str(folder))


def save_multi_vector(
    folder: Path,
    transformer: Transformer,
    *,
    widths: tuple[int, ...] = (WIDTH, COLUMNS),
    mask: MultiVectorMask | None = None,
    **options: Any,
) -> None:
    """A model, projections of its token vectors from width to width, and their normalisation."""
    name: Any = {"module_input_name": "token_embeddings"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        dense = [
            Dense(*pair, bias=False, activation_function=nn.Identity(), **name) for pair in pairwise(widths)
        ]
    modules: list[Any] = [transformer, *dense, mask or MultiVectorMask(), Normalize(**name)]
    MultiVectorEncoder(modules=modules, **options).save_pretrained(str(folder))


def save_colbert(folder: Path, source: Path) -> None:
    """A BERT with queries of fixed length, whose added tokens others do not attend to; and a skip list."""
    plain = save_model(source, wordpiece(), "BertModel", SIZES)
    expansion: Any = {"strategy": "fixed", "attend": False, "length": 32}
    save_multi_vector(
        folder,
        Transformer(plain, query_expansion=expansion, document_length=100),
        mask=MultiVectorMask(skiplist_words=list(string.punctuation)),
        prompts={"query": "[Q] ", "document": "[D] "},
    )


def save_modern_colbert(folder: Path, source: Path) -> None:
    """A ModernBERT with queries of a smallest length, all of whose tokens are attended to."""
    plain = save_model(source, byte_pairs(), "ModernBertModel", {**SIZES, **MODERNBERT})
    expansion: Any = {"strategy": "min", "attend": True, "length": 24, "token": "</s>"}
    transformer = Transformer(plain, query_expansion=expansion, query_length=40, document_length=90)
    prompts = {"query": "search_query: ", "document": "search_document: "}
    save_multi_vector(folder, transformer, prompts=prompts)


def save_mean_colbert(folder: Path, source: Path) -> None:
    """An XLM-R without expansion, with two projections and the mean of similarities."""
    plain = save_model(source, unigram(), "XLMRobertaModel", SIZES)
    transformer = Transformer(plain, query_length=20, document_length=90)
    save_multi_vector(folder, transformer, widths=(WIDTH, 48, COLUMNS), similarity_fn_name="meanmaxsim")


def save_skipping_colbert(folder: Path, source: Path) -> None:
    """A DistilBERT with a skip list for queries, too, and queries of a smallest length."""
    plain = save_model(source, wordpiece(), "DistilBertModel", DISTILBERT)
    expansion: Any = {"strategy": "min", "attend": False, "length": 20}
    mask = MultiVectorMask(skiplist_words=[".", ",", "the"], skiplist_tasks=["query", "document"])
    save_multi_vector(folder, Transformer(plain, query_expansion=expansion), mask=mask)


def save_m3(folder: Path, source: Path) -> None:
    """A dense XLM-R with the further heads of BGE-M3."""
    plain = save_model(source, unigram(), "XLMRobertaModel", SIZES)
    modules = [Transformer(plain), Pooling(WIDTH, "cls"), Normalize()]
    SentenceTransformer(modules=modules).save_pretrained(str(folder))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        for name, columns in (("sparse", 1), ("colbert", COLUMNS)):
            torch.save(nn.Linear(WIDTH, columns).state_dict(), folder / f"{name}_linear.pt")


SPLADE, COLBERT, INFERENCE_FREE, M3 = "splade", "colbert", "inference-free", "m3"
SPARSE: dict[str, Callable[[Path, Path], None]] = {
    SPLADE: save_splade,
    "splade-sum": save_splade_sum,
    INFERENCE_FREE: save_inference_free,
    "autoencoder": save_autoencoder,
}
MULTI_VECTOR: dict[str, Callable[[Path, Path], None]] = {
    COLBERT: save_colbert,
    "modern-colbert": save_modern_colbert,
    "mean-colbert": save_mean_colbert,
    "skipping-colbert": save_skipping_colbert,
}
FOLDERS = {**SPARSE, **MULTI_VECTOR, M3: save_m3}


def save_folder(name: str, folder: Path) -> Path:
    """Makes a folder of `FOLDERS`."""
    with TemporaryDirectory() as source:
        FOLDERS[name](folder, Path(source))
    return folder
