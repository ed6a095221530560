"""Text in front of attention: vocabulary, token ids and embedding; and the named presets."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_serving.model.presets import SENTENCE, build_preset
from attention_serving.model.text import TextAttention, sentence_tokenizer
from tests.support.tables import GOLDEN_TABLES, TEXT

WORDS = st.lists(st.text("aAbz'é-7", min_size=1, max_size=4), min_size=1, max_size=8)


def test_vocabulary_and_ids_are_the_published_ones() -> None:
    tokenizer = sentence_tokenizer(TEXT["sentence"])
    assert tokenizer.get_vocab() == TEXT["vocabulary"]
    preset = build_preset("sentence-self-attention")
    assert isinstance(preset, TextAttention)
    assert (
        tokenizer.encode(TEXT["sentence"]).ids == preset.tokenizer.encode(SENTENCE).ids == TEXT["token_ids"]
    )


@given(words=WORDS, separator=st.sampled_from([" ", ", ", ",  "]))
def test_an_id_is_the_place_of_the_word_among_the_sorted_words(words: list[str], separator: str) -> None:
    sentence, order = separator.join(words), sorted(set(words))
    assert sentence_tokenizer(sentence).encode(sentence).ids == [order.index(word) for word in words]


def test_the_published_sentence_gives_the_published_context_vectors() -> None:
    table = next(table for table in GOLDEN_TABLES if table.id == "self-attention-4")
    attention, tokenizer = table.module(), sentence_tokenizer(TEXT["sentence"])
    module = TextAttention(tokenizer, attention.config)
    module.attention = attention
    ids = tokenizer.encode(TEXT["sentence"]).ids
    with torch.inference_mode():
        # The published rows stand in the order of the sentence.
        module.embedding.weight[ids] = torch.tensor(TEXT["embedding_3"])
        context, _ = module(torch.tensor([ids]))
    expected = table.expected["context_vectors"]
    np.testing.assert_allclose(context[0], expected, rtol=0, atol=table.tolerance)


@pytest.mark.parametrize("name", ["sentence-self-attention", "stacked-multi-head", "dropout-multi-head"])
def test_the_seed_alone_decides_the_weights(name: str) -> None:
    before = torch.get_rng_state()
    one, same, other = (build_preset(name, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in one.modules())
    torch.testing.assert_close(one.state_dict(), same.state_dict(), rtol=0, atol=0)
    assert not any(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())
