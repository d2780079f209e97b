"""A generation as one response object, or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.api.usage import draftwood_object, usage
from gateway.generation.answer import Delta, TokenText
from gateway.generation.generation import Generator
from gateway.generation.outcome import Outcome
from gateway.generation.plan import Plan
from gateway.generation.verify_client import Started


class Format(Protocol):
    """How an API writes its choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk's choice; None sends none."""
        ...

    def growth(self, index: int, delta: Delta) -> dict[str, Any]:
        """A chunk's choice with more text."""
        ...

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The last chunk's choice."""
        ...

    def whole(self, index: int, delta: Delta, finish_reason: str) -> dict[str, Any]:
        """The choice of an unstreamed answer."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one response repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def write(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object with these choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """One response in the making."""

    head: Head
    form: Format
    plan: Plan
    generator: Generator

    async def whole(self) -> dict[str, Any]:
        """The response object, once all choices have ended."""
        texts: dict[int, list[str]] = {index: [] for index in range(len(self.plan.choices))}
        tokens: dict[int, list[TokenText]] = {index: [] for index in texts}
        outcomes: dict[int, Outcome] = {}
        async with aclosing(self.generator.run(self.plan)) as updates:
            async for index, update in updates:
                match update:
                    case Started():
                        pass
                    case Delta():
                        texts[index].append(update.text)
                        tokens[index] += update.tokens
                    case Outcome():
                        outcomes[index] = update
        choices = [
            self.form.whole(i, Delta("".join(texts[i]), tuple(tokens[i])), outcomes[i].finish_reason) for i in texts
        ]
        return self.head.write(self.form.whole_object, choices) | self._figures(outcomes)

    async def chunks(self, *, include_usage: bool) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a stream. The last finish chunk carries the `draftwood` object; so does the usage chunk."""
        outcomes: dict[int, Outcome] = {}
        extra: dict[str, Any] = {"usage": None} if include_usage else {}
        async with aclosing(self.generator.run(self.plan)) as updates:
            async for index, update in updates:
                match update:
                    case Started():
                        choice = self.form.opening(index)
                    case Delta():
                        choice = self.form.growth(index, update)
                    case Outcome():
                        outcomes[index] = update
                        choice = self.form.ending(index, update.finish_reason)
                        if len(outcomes) == len(self.plan.choices):
                            extra["draftwood"] = self._figures(outcomes)["draftwood"]
                if choice is not None:
                    yield self.head.write(self.form.chunk_object, [choice]) | extra
        if include_usage:
            yield self.head.write(self.form.chunk_object, []) | self._figures(outcomes)

    def _figures(self, outcomes: dict[int, Outcome]) -> dict[str, Any]:
        ordered = [outcomes[index] for index in sorted(outcomes)]
        return {
            "usage": usage(self.plan.prompt_lengths, ordered),
            "draftwood": draftwood_object(self.plan.seed, ordered),
        }
