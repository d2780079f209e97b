"""Client of the gateway: one question, its answer as it arrives, and the figures that come with the end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from draftwood.errors import InternalError, InvalidRequestError, UnavailableError
from draftwood.security.auth_tokens import header
from draftwood.security.security import https_trust

_TIMEOUT = httpx.Timeout(600.0, connect=5.0)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question and how it is to be answered; None leaves a setting to the server."""

    text: str
    system: str | None = None
    temperature: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    algorithm: str | None = None
    tree_budget: int | None = None

    def body(self, model: str) -> dict[str, Any]:
        """The JSON body of a streaming chat completion."""
        messages = [{"role": "user", "content": self.text}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        settings = {
            "temperature": self.temperature, "seed": self.seed, "max_completion_tokens": self.max_tokens,
            "algorithm": self.algorithm, "tree_budget": self.tree_budget,
        }  # fmt: skip
        given = {name: value for name, value in settings.items() if value is not None}
        return {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}} | given


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the gateway says of an answer."""

    num_tokens: int
    steps: int
    tokens_per_step: float
    drafted: int
    accepted: int
    fallback_steps: int
    seed: int
    decode_ms: float
    stage_ms: dict[str, float]  # draft, tree, verify, accept, commit: sums over the steps

    @property
    def tokens_per_s(self) -> float:
        """Speed of decoding: from the first token to the last, the prefill not counted."""
        return (self.num_tokens - 1) * 1000 / self.decode_ms if self.decode_ms > 0 else 0.0

    @property
    def acceptance(self) -> float:
        """Share of draft nodes that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    finish_reason: str
    figures: Figures


class RestClient:
    """A gateway's REST API at `url`, with or without the /v1 at its end. An async context manager.

    `authorities` is a file of those whose certificates are trusted in the system's place, `key` the API key to send.
    """

    def __init__(self, url: str, *, authorities: str = "", key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        # Proxies of the environment are for the outside world.
        self._http = httpx.AsyncClient(
            timeout=_TIMEOUT,
            trust_env=False,
            verify=https_trust(authorities),
            headers={"authorization": header(key)} if key else None,
        )

    async def __aenter__(self) -> RestClient:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """Name of the served model. Raises UnavailableError where nothing answers."""
        try:
            response = await self._http.get(f"{self.url}/models")
        except httpx.TransportError as error:
            raise UnavailableError(
                f"no gateway answers at {self.url} ({error}); start one with `draftwood up`"
            ) from error
        await _raise_for_status(response)
        return response.json()["data"][0]["id"]

    async def stream(self, question: Question, model: str) -> AsyncIterator[str | Answer]:
        """Pieces of text as they arrive, then the whole answer."""
        pieces: list[str] = []
        finish_reason, usage, figures = "", dict[str, Any](), dict[str, Any]()
        async with self._http.stream("POST", f"{self.url}/chat/completions", json=question.body(model)) as response:
            await _raise_for_status(response)
            async for event in server_sent_events(response.aiter_lines()):
                if "error" in event:
                    raise InternalError(event["error"].get("message", "the gateway reported an error"))
                usage, figures = event.get("usage") or usage, event.get("draftwood") or figures
                for choice in event.get("choices", ()):
                    finish_reason = choice.get("finish_reason") or finish_reason
                    piece = choice.get("delta", {}).get("content")
                    if piece:
                        pieces.append(piece)
                        yield piece
        yield Answer("".join(pieces), finish_reason, _figures(usage, figures))


async def server_sent_events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """JSON events of an OpenAI-style stream, up to its [DONE]; comment lines, which keep it alive, are skipped."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


async def _raise_for_status(response: httpx.Response) -> None:
    if response.status_code < 400:
        return
    text = (await response.aread()).decode(errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (json.JSONDecodeError, KeyError, TypeError):
        message = text[:200]
    kind = InvalidRequestError if response.status_code < 500 and response.status_code != 429 else UnavailableError
    raise kind(f"the gateway answers {response.status_code}: {message}")


def _figures(usage: dict[str, Any], extra: dict[str, Any]) -> Figures:
    if not extra:
        raise InternalError("the answer carries no `draftwood` figures: is this a Draftwood gateway?")
    return Figures(
        num_tokens=usage.get("completion_tokens", 0),
        steps=extra["steps"],
        tokens_per_step=extra["tokens_per_step"] or 0.0,  # null where the answer is one token
        drafted=extra["drafted"] or 0,
        accepted=extra["accepted"],
        fallback_steps=extra["fallback_steps"] or 0,
        seed=extra["seed"],
        decode_ms=extra["decode_ms"] or 0.0,
        stage_ms={stage: value or 0.0 for stage, value in extra["stage_ms"].items()},
    )
