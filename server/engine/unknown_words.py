"""Finds the words of a text for which a tokenizer lacks a token."""

import re
from collections.abc import Iterator

from tokenizers import Tokenizer

SPACE = " "
WHITE_SPACE = " \n\t\r"
# How much of a text is split into words at a time, in characters: each word is an object, and no other thread
# runs while the library makes them.
PIECE_CHARACTERS = 1 << 14
# A longer word is looked at character by character, each once.
LONG_WORD = 256
MAX_NAMED = 10


class UnknownWords:
    """Names words without a token. Time grows with the length of the text, and memory does not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        contents.sort(key=len, reverse=True)  # of two tokens that begin alike, the longer is replaced
        self._added = re.compile("|".join(map(re.escape, contents))) if contents else None

    def of(self, text: str) -> str:
        """A message that names the first words without a token; empty if every word has one."""
        unknown: dict[str, None] = {}
        known: set[str] = set()
        for word in self._words(text):
            if word in known or word in unknown:
                continue
            if self._is_known(word):
                known.add(word)
                continue
            if len(unknown) == MAX_NAMED:
                return f"unknown words: {_listed(unknown)} and others"
            unknown[word] = None
        return f"unknown words: {_listed(unknown)}" if unknown else ""

    def _words(self, text: str) -> Iterator[str]:
        for piece in _pieces(text):
            content = self._added.sub(SPACE, piece) if self._added else piece
            if self._tokenizer.normalizer is not None:
                content = self._tokenizer.normalizer.normalize_str(content)
            if self._tokenizer.pre_tokenizer is None:
                yield content
            else:
                yield from (word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(content))

    def _is_known(self, word: str) -> bool:
        if len(word) > LONG_WORD:
            if self._tokenizer.model.token_to_id(word) is not None:
                return True
            word = "".join(dict.fromkeys(word))
        try:
            tokens = self._tokenizer.model.tokenize(word)
        except Exception:  # the library does not raise a narrower type
            return False
        covered: int = sum(end - start for start, end in (token.offsets for token in tokens))  # in bytes
        return covered == len(word.encode())


def _pieces(text: str) -> Iterator[str]:
    """The text in parts that begin at white space, if there is any near enough."""
    start = 0
    while start < len(text):
        end = start + PIECE_CHARACTERS
        if end < len(text):
            space = max(text.rfind(character, start + 1, end) for character in WHITE_SPACE)
            end = space if space > 0 else end
        yield text[start:end]
        start = end


def _listed(words: dict[str, None]) -> str:
    return ", ".join(repr(word if len(word) <= LONG_WORD else f"{word[:LONG_WORD]}...") for word in words)
