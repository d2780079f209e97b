"""What a request comes to: for each of its choices one GenerateOptions and one set of limits."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.generation.answer import Limits
from gateway.generation.verify_client import GenerateOptions


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to generate."""

    options: GenerateOptions
    limits: Limits


@dataclass(frozen=True, slots=True)
class Plan:
    """All answers of a request, prompt by prompt; the order is that of the choices' indexes."""

    prompts: list[list[int]]
    choices: list[Choice]
    seed: int
    max_parallel: int  # choices that are asked for at a time; as many as are decoded together always fit the queue

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt) for prompt in self.prompts]
