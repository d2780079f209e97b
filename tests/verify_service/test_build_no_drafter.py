"""A service that is to serve without drafts wants none: nothing falls back, no alarm waits for a drafter, no tree is
prepared for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftwood.v1 import tree_pb2, verify_pb2
from tests.system.scraping import parse, value
from tests.verify_service.harness import config_of, run_all
from tests.verify_service.models import save_tiny
from verify_service.api.codec import request_from_wire
from verify_service.api.servicer import VerifyServicer
from verify_service.build import Service, build
from verify_service.gpu.runner import GraphRunner
from verify_service.kernels.reference.kernel_set import PLAIN
from verify_service.telemetry.metrics import Telemetry


@pytest.fixture
def service(tmp_path: Path) -> Service:
    save_tiny("qwen3", tmp_path, max_position_embeddings=256)
    return build(config_of(tmp_path, max_batch=2, algorithm="ddtree", shadow_linear=True))


@pytest.mark.parametrize("asked", [tree_pb2.ALGORITHM_UNSPECIFIED, tree_pb2.ALGORITHM_DDTREE])
def test_no_step_of_it_is_a_fallback(service: Service, asked: Any) -> None:
    message = verify_pb2.GenerateRequest(prompt_token_ids=[5, 9], max_new_tokens=4, algorithm=asked)
    request = request_from_wire(message, service.defaults)
    assert (request.algorithm, request.shadow_linear) == ("none", False)
    service.engine.start()
    (answer,) = run_all(service.engine, [request])
    stats = answer.stats
    service.engine.stop()
    assert (stats.num_steps, stats.num_fallback_steps) == (3, 0)
    said = parse(Telemetry(service.engine, service.client).instruments.exposition())
    kinds = {kind: value(said, "draftwood_sequence_steps_total", kind=kind) for kind in ("plain", "fallback")}
    assert kinds == {"plain": 3, "fallback": 0}
    assert value(said, "draftwood_drafter_state", state="none") == 1
    assert value(said, "draftwood_drafter_state", state="absent") == 0


async def test_it_says_that_it_drafts_nothing(service: Service) -> None:
    servicer = VerifyServicer(
        service.engine, service.client, service.defaults, service.facts, Telemetry(service.engine, service.client)
    )
    assert servicer.drafter_status == "none: no drafter is configured"
    assert service.defaults.algorithm == "none"


@pytest.mark.parametrize("is_drafted", [False, True])
def test_only_steps_that_may_come_are_prepared(service: Service, tmp_path: Path, is_drafted: bool) -> None:
    graphed = build(config_of(tmp_path, max_batch=2, max_tree_budget=15, page_size=64), kernels=PLAIN)
    if is_drafted:
        graphed = replace(graphed, defaults=replace(graphed.defaults, is_drafted=True))
    graphed.warm_up()
    runner = graphed.engine.runner
    assert isinstance(runner, GraphRunner)
    assert {n for kind, _, n in runner._graphs if kind == "step"} == ({1, 8, 16} if is_drafted else {1})
