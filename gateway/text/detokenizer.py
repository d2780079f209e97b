"""Tokens to text, one by one: never half a character, and together what decoding all ids at once gives.

A character that spans tokens comes out with the last of them. A character that the answer's end cuts does not come out
at all, whether or not the answer is streamed.
"""

from __future__ import annotations

import codecs

from gateway.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_WAITING = 256  # tokens that are no character: far more than one can span, few enough to decode for each token


class ByteDetokenizer:
    """For byte-level vocabularies: the bytes of the tokens, through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that the token completes."""
        if token_id in self._tokenizer.special_contents:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))


class WindowDetokenizer:
    """For every other vocabulary: decodes a short window of tokens with and without the new one and takes the rest.

    The window begins at the last token whose text came out, so that decoders that treat the first token differently
    (a stripped space) see the same first token both times. Why the library's own stream does not serve is in
    docs/decisions/0017-own-detokenizer.md.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_known = 0  # tokens at the window's start whose text came out before

    def push(self, token_id: int) -> str:
        """The new text, unless it may end inside a character."""
        if token_id in self._tokenizer.special_contents:
            return ""
        self._window.append(token_id)
        before = self._tokenizer.decode(self._window[: self._num_known])
        after = self._tokenizer.decode(self._window)
        may_be_cut = after.endswith(REPLACEMENT) and len(self._window) - self._num_known < MAX_WAITING
        if len(after) <= len(before) or may_be_cut:
            return ""
        self._window = self._window[self._num_known :]
        self._num_known = len(self._window)
        return after[len(before) :]


def new_detokenizer(tokenizer: Tokenizer) -> ByteDetokenizer | WindowDetokenizer:
    """The kind that suits the vocabulary."""
    return ByteDetokenizer(tokenizer) if tokenizer.is_byte_level else WindowDetokenizer(tokenizer)
