"""A draft service from its configuration to a listening server, and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import draftwood
from draft_service.api.servicer import DraftServicer
from draft_service.draft.drafter import ContextRows, Drafter, SequenceStep
from draft_service.gpu.device_trees import TreeKernels
from draft_service.model.config import DrafterConfig, read_drafter_config
from draft_service.model.draft_model import DraftModel
from draft_service.model.tensors import (
    load_drafter_tensors,
    load_target_tensors,
    random_drafter_tensors,
    random_projection_checksum,
    random_target_tensors,
)
from draft_service.telemetry import UNWATCHED, Telemetry
from draftwood.checkpoint import model_id, projection_checksum, resolve, tokenizer_directory, tokenizer_hash
from draftwood.config import DraftConfig
from draftwood.device.device import has_triton, pick_device, pick_dtype, use_threads
from draftwood.errors import ConfigError
from draftwood.noise import NOISE_VERSION
from draftwood.rpc.wire import PROTOCOL_VERSION
from draftwood.security.security import OPEN, Security
from draftwood.tree_options import TreeOptions
from draftwood.v1 import draft_pb2, draft_pb2_grpc

SERVICE = "draftwood.v1.DraftService"
DRAIN_S = 2.0
HEARTBEAT_S = 5.0
LONGEST_PASS_S = 30.0
MAX_DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter and what the handshake says about it."""

    drafter: Drafter
    handshake: draft_pb2.GetDraftModelResponse
    dtype: str
    num_threads: int


def load(config: DraftConfig) -> LoadedDrafter:
    """Loads, compiles and warms up. Called on the thread that will run the model: OpenMP's workers belong to it."""
    if config.draft == "none":
        raise ConfigError("--draft is 'none': a draft service needs a draft model", field="draft")
    draft, target = resolve(config.draft, setting="draft"), resolve(config.target, setting="target")
    device = pick_device(config)
    dtype = pick_dtype(config, device)
    use_threads(config.threads)
    model_config = read_drafter_config(draft).with_block_size(config.block_size).with_window(config.draft_window)
    max_context = longest_context(config, model_config)
    if config.random_weights:
        tensors = random_drafter_tensors(model_config, dtype, device)
        borrowed = random_target_tensors(target, model_config, dtype, device)
    else:
        tensors, borrowed = load_drafter_tensors(draft, model_config), load_target_tensors(target, model_config)
    model = DraftModel(tensors, borrowed, model_config, dtype=dtype, device=device)
    drafter = Drafter(
        model,
        max_context=max_context,
        max_batch=config.max_batch,
        compile=config.compile,
        kernels=TreeKernels(plain=False) if device.type == "cuda" and has_triton() else None,
    )
    warm_up(drafter)
    handshake = draft_pb2.GetDraftModelResponse(
        model=_describe(config, draft, target, model_config, max_context),
        incarnation=secrets.randbits(64),
        version=draftwood.__version__,
    )
    return LoadedDrafter(drafter, handshake, str(dtype).removeprefix("torch."), torch.get_num_threads())


def longest_context(config: DraftConfig, model: DrafterConfig) -> int:
    """Tokens that a sequence's context may have."""
    return config.max_context or min(model.max_position_embeddings, MAX_DEFAULT_CONTEXT)


def _describe(
    config: DraftConfig, draft: Path, target: Path, model: DrafterConfig, max_context: int
) -> draft_pb2.DraftModel:
    texts = tokenizer_directory(target, random_weights=config.random_weights)
    checksum = random_projection_checksum(model) if config.random_weights else projection_checksum(draft)
    return draft_pb2.DraftModel(
        model_id=model_id(config.draft, draft),
        block_size=model.block_size,
        max_depth=model.max_depth,
        target_layer_ids=model.target_layer_ids,
        mask_token_id=model.mask_token_id,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        tokenizer_hash=tokenizer_hash(texts),
        projection_checksum=checksum,
        context_window=model.context_window,
        max_context=max_context,
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
    )


def warm_up(drafter: Drafter) -> None:
    """Runs alone and batched passes at two context lengths each, so that no request waits for a compiler."""
    width = drafter.config.hidden_size
    longest = drafter.cache.max_context
    for epoch, length in enumerate((min(4, longest), min(21, longest)), start=1):
        for batch in (1, min(2, drafter.max_batch)):
            steps = [
                SequenceStep(
                    i, epoch, length, 0, ContextRows(0, torch.zeros(length, width)), TreeOptions("ddtree", 7, 8)
                )
                for i in range(batch)
            ]
            drafter.step(0, steps, (), lambda: False)
    drafter.close_stream(0)


class DraftServer:
    """A listening draft service."""

    def __init__(
        self,
        loaded: LoadedDrafter,
        worker: ThreadPoolExecutor,
        lease_s: float = 60.0,
        telemetry: Telemetry | None = None,
        security: Security = OPEN,
    ) -> None:
        self._worker, self._telemetry, self._security = worker, telemetry, security
        self._servicer = DraftServicer(loaded.drafter, worker, loaded.handshake, lease_s, telemetry or UNWATCHED)
        if telemetry is not None:
            telemetry.read_streams(self._servicer.streams)
        self._health = health.aio.HealthServicer()
        self._server = security.server()
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME),  # pyright: ignore[reportUnknownMemberType]
            self._server,
        )
        self._heartbeat: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> Self:
        """Listens; raises ConfigError where the address cannot be had."""
        try:
            self.port = self._security.listen(self._server, host, port)
        except RuntimeError as error:
            raise ConfigError(f"--host {host} --port {port}: cannot listen there ({error})", field="port") from error
        await self._server.start()
        await self._set_health(is_serving=True)
        self._heartbeat = asyncio.create_task(self._watch_worker())
        return self

    async def stop(self, grace: float = DRAIN_S) -> None:
        """Says NOT_SERVING, lets calls finish for `grace` seconds, ends the rest and the worker."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heartbeat
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
        self._servicer.streams.close()
        self._worker.shutdown()
        if self._telemetry is not None:
            self._telemetry.close()

    async def _set_health(self, *, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def _watch_worker(self) -> None:
        """Health follows the thread that owns the model: it must get round to an empty job."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            turn = loop.run_in_executor(self._worker, lambda: None)
            done, _ = await asyncio.wait({turn}, timeout=LONGEST_PASS_S)
            if not done:
                await self._set_health(is_serving=False)
                await turn
                await self._set_health(is_serving=True)
