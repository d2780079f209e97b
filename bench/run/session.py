"""What all benchmarks need: a verify service, started here or running already, and prompts as token ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from bench.figures.values import Target
from bench.run.client import VerifyClient
from bench.run.prompts import PromptEncoder
from draftwood import checkpoint
from draftwood.cli.machine import peak_memory_bytes
from draftwood.cli.options import build, settings
from draftwood.cli.stack.drafter import require_drafter
from draftwood.cli.stack.launch import private_config, private_settings, private_stack
from draftwood.cli.stack.stack import NO_DRAFTER, Stack
from draftwood.config import ModelConfig, PeerConfig, flag
from draftwood.errors import ConfigError
from draftwood.security.security import Security

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

PEER_FIELDS = tuple(spec.name for spec in fields(PeerConfig))
STACK_FIELDS = (
    "target", "draft", "random_weights", "dtype", "device", "threads", "draft_threads", "compile", *PEER_FIELDS,
)  # fmt: skip


def session_options(**defaults: Any) -> Callable[[AnyFunction], AnyFunction]:
    """The option --verify, those with which a running service is called, and those of a stack started here."""

    def decorate(function: AnyFunction) -> AnyFunction:
        address = click.option(
            "--verify",
            help="Address of a running verify service; without it, services are started on free "
            "ports with the options below.",
        )
        return address(settings(PeerConfig)(private_settings(**defaults)(function)))

    return decorate


@dataclass(frozen=True)
class Session:
    """A verify service to measure."""

    client: VerifyClient
    target: Target
    directory: Path  # of the target model
    encoder: PromptEncoder
    stack: Stack | None

    async def peak_memory(self) -> dict[str, int]:
        """Peak resident bytes by service; of a service that was not started here, the verify service's alone."""
        if self.stack is None:
            return {"verify": await self.client.peak_memory_bytes()}
        return {name: peak_memory_bytes([pid]) for name, pid in self.stack.pids.items()}


@asynccontextmanager
async def open_session(
    verify: str | None, values: dict[str, Any], *, needs_drafter: bool, max_concurrency: int, max_tree_budget: int
) -> AsyncGenerator[Session]:
    """Starts or finds the services. Raises ConfigError where the tokenizer or the drafter is not what is needed."""
    peers = build(PeerConfig, {name: values[name] for name in PEER_FIELDS if name in values})
    if verify is None and (given := [name for name in PEER_FIELDS if getattr(peers, name)]):
        raise ConfigError(f"{flag(given[0])} is for calling a running service: it needs --verify", field=given[0])
    security = Security.load(peers)
    directory = checkpoint.resolve(values["target"], setting="target")
    texts = checkpoint.tokenizer_directory(directory, random_weights=values["random_weights"])
    encoder = PromptEncoder(texts)
    async with AsyncExitStack() as exits:
        stack = None
        if verify is None:
            more: dict[str, Any] = {
                "max_batch": max(max_concurrency, ModelConfig.max_batch),
                "max_tree_budget": max_tree_budget,
            }
            if not needs_drafter:
                more["draft"] = NO_DRAFTER
            stack = await exits.enter_async_context(private_stack(private_config(values, **more)))
        address = stack.verify_address if stack is not None else str(verify)
        if needs_drafter:
            await require_drafter(address, security)
        client = await exits.enter_async_context(VerifyClient(address, security))
        target = await client.target()
        if target.tokenizer_hash != checkpoint.tokenizer_hash(texts):
            raise ConfigError(
                f"--target {values['target']} has another tokenizer than {target.model_id} at {address}", field="target"
            )
        yield Session(client, target, directory, encoder, stack)
