"""Objects of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.api.chat import finite
from gateway.generation.answer import Delta, TokenText
from gateway.text.tokenizer import Tokenizer


class CompletionFormat:
    """Choices as the completions API writes them; `echoes` holds, choice by choice, the text put before the answer."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, echoes: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._echoes = echoes

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk's choice: the prompt, where it is echoed."""
        return _choice(index, self._echoes[index], None) if self._echoes[index] else None

    def growth(self, index: int, delta: Delta) -> dict[str, Any]:
        """A chunk's choice with more text."""
        return _choice(index, delta.text, None, self._log_probs(delta.tokens))

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The last chunk's choice."""
        return _choice(index, "", finish_reason)

    def whole(self, index: int, delta: Delta, finish_reason: str) -> dict[str, Any]:
        """The choice of an unstreamed answer."""
        return _choice(index, self._echoes[index] + delta.text, finish_reason, self._log_probs(delta.tokens))

    def _log_probs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not tokens:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [finite(token.log_probs.log_prob) for token in tokens],
            "top_logprobs": [
                {self._tokenizer.token_text(token_id): finite(log_prob) for token_id, log_prob in token.log_probs.top}
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }


def _choice(
    index: int, text: str, finish_reason: str | None, log_probs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": log_probs, "finish_reason": finish_reason}
