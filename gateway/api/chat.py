"""Objects of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.generation.answer import Delta, TokenText
from gateway.generation.verify_client import TokenLogProbs
from gateway.text.tokenizer import Tokenizer

LEAST_LOG_PROB = -9999.0  # JSON has no infinity; OpenAI's word for it


def finite(log_prob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(log_prob, LEAST_LOG_PROB)


class ChatFormat:
    """Choices as the chat API writes them."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk's choice: the role."""
        return _chunk_choice(index, {"role": "assistant", "content": ""}, None)

    def growth(self, index: int, delta: Delta) -> dict[str, Any]:
        """A chunk's choice with more text."""
        return _chunk_choice(index, {"content": delta.text}, None, self._log_probs(delta.tokens))

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The last chunk's choice."""
        return _chunk_choice(index, {}, finish_reason)

    def whole(self, index: int, delta: Delta, finish_reason: str) -> dict[str, Any]:
        """The choice of an unstreamed answer."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._log_probs(delta.tokens),
            "finish_reason": finish_reason,
        }

    def _log_probs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        """The chosen tokens' strings join to the content, their bytes to its UTF-8 form."""
        if not tokens:
            return None
        content = [self._entry(token) for token in tokens]
        return {"content": content, "refusal": None}

    def _entry(self, token: TokenText) -> dict[str, Any]:
        log_probs: TokenLogProbs = token.log_probs
        own_bytes = token.text.encode() if token.is_cut else self._tokenizer.token_bytes(log_probs.token_id)
        return {
            "token": token.text,
            "logprob": finite(log_probs.log_prob),
            "bytes": list(own_bytes),
            "top_logprobs": [
                {
                    "token": self._tokenizer.token_text(token_id),
                    "logprob": finite(log_prob),
                    "bytes": list(self._tokenizer.token_bytes(token_id)),
                }
                for token_id, log_prob in log_probs.top
            ],
        }


def _chunk_choice(
    index: int, delta: dict[str, Any], finish_reason: str | None, log_probs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": finish_reason}
