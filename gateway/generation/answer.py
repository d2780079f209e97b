"""One choice as its tokens arrive: where it ends, its text, its log-probabilities.

The limits are enforced here as well as in the verify service, so that a run of tokens that arrives together is cut at
the first token, or the first character, that ends the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gateway.generation.verify_client import TokenLogProbs
from gateway.text.detokenizer import new_detokenizer
from gateway.text.stop_strings import StopStrings
from gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends an answer. Before `min_tokens` tokens nothing but `max_tokens` does."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token with the text that it added, the place of that text in the answer, and its log-probabilities."""

    text: str
    offset: int
    log_probs: TokenLogProbs
    is_cut: bool = False  # by a stop string: only the text before it is here

    @property
    def end(self) -> int:
        """The place behind the text."""
        return self.offset + len(self.text)


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new: text, and the tokens it came from where log-probabilities were asked for."""

    text: str = ""
    tokens: tuple[TokenText, ...] = ()


@dataclass
class Answer:
    """State of one choice. `finish_reason` is set once the answer has ended; what is pushed later is ignored."""

    tokenizer: Tokenizer
    limits: Limits
    finish_reason: str | None = None
    num_tokens: int = 0
    is_stop_string: bool = False
    _length: int = 0  # characters given out
    _seen: int = 0  # characters seen, those held back included
    _waiting: list[TokenText] = field(default_factory=list[TokenText])

    def __post_init__(self) -> None:
        self._detokenizer = new_detokenizer(self.tokenizer)
        self._stops = StopStrings(self.limits.stop_strings)

    def push(self, token_ids: Sequence[int], log_probs: Sequence[TokenLogProbs] = ()) -> Delta:
        """Takes tokens in order, up to the one that ends the answer."""
        parts: list[str] = []
        for i, token_id in enumerate(token_ids):
            if self.finish_reason is not None:
                break
            parts.append(self._push(token_id, log_probs[i] if log_probs else None))
        return self._delta("".join(parts))

    def finish(self, reason: str) -> Delta:
        """Ends the answer for a reason that the verify service gave, unless it has ended already."""
        if self.finish_reason is not None:
            return Delta()
        return self._delta(self._end(reason))

    def _push(self, token_id: int, log_probs: TokenLogProbs | None) -> str:
        may_stop = self.num_tokens >= self.limits.min_tokens
        self.num_tokens += 1
        if may_stop and token_id in self.limits.stop_token_ids:
            return self._end("stop")
        piece = self._detokenizer.push(token_id)
        if log_probs is not None:
            self._waiting.append(TokenText(piece, self._seen, log_probs))
        self._seen += len(piece)
        text, self.is_stop_string = self._stops.push(piece) if may_stop else (piece, False)
        if self.is_stop_string:
            self.finish_reason = "stop"
        elif self.num_tokens >= self.limits.max_tokens:
            text += self._end("length")
        return text

    def _end(self, reason: str) -> str:
        self.finish_reason = reason
        return self._stops.flush()

    def _delta(self, text: str) -> Delta:
        """Gives out text with the tokens that it covers, at a stop string the part of a token that is before it."""
        self._length += len(text)
        count = 0
        while count < len(self._waiting) and self._waiting[count].end <= self._length:
            count += 1
        tokens, self._waiting = self._waiting[:count], self._waiting[count:]
        if self.is_stop_string and self._waiting and self._waiting[0].offset < self._length:
            cut = self._waiting[0]
            tokens.append(replace(cut, text=cut.text[: self._length - cut.offset], is_cut=True))
        return Delta(text, tuple(tokens))
