"""Tiny models of families on a GPU, compiled and in graphs as they are served: ids equal to transformers' own on the
CPU, whoever draws, and sampled answers equal to the CPU engine's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from draftwood.config import VerifyConfig
from draftwood.sampling import SamplingParams
from tests.verify_service.cpu import test_runner_exactness as exactness
from tests.verify_service.gpu import test_runner as over_buffers
from tests.verify_service.harness import run_all, start_engine
from verify_service.core.request import Request
from verify_service.gpu.runner import GraphRunner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]  # compilers take a minute a family

CAPTURED = ("qwen3_5_text", "granitemoehybrid", "falcon_h1", "bamba", "mamba2", "lfm2", "gemma2")
WITH_EXPERTS = ("gpt_oss", "nemotron_h", "qwen3_next")
FILTERS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {},
]


@pytest.fixture(scope="module", params=[*CAPTURED, *WITH_EXPERTS])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[exactness.Case]:
    directory = tmp_path_factory.mktemp(request.param)
    serving = over_buffers.served(
        request.param, directory, None, compile=True, device="cuda", max_batch=4, page_size=64
    )
    case = next(serving)
    runner = case.engine.runner
    assert isinstance(runner, GraphRunner)
    assert runner.capture.enabled == (request.param in CAPTURED)
    case.script["directory"] = str(directory)
    yield case
    assert next(serving, None) is None  # stopped


@pytest.mark.parametrize("num_log_probs", [None, 3], ids=["drawn on the device", "drawn by the host"])
def test_ids_equal_transformers(case: exactness.Case, num_log_probs: int | None) -> None:
    over_buffers.test_ids_equal_transformers(case, num_log_probs)


def test_stop_tokens_and_seeds(case: exactness.Case) -> None:
    over_buffers.test_stop_tokens_and_seeds(case)


def test_a_long_chain_goes_on_in_the_next_step(case: exactness.Case) -> None:
    over_buffers.test_a_long_chain_goes_on_in_the_next_step(case)


def test_sampled_answers_are_the_cpus(case: exactness.Case) -> None:
    """Filters of every kind drawn on the GPU, and draws that are the host's, without drafts and with trees."""
    requests, _ = over_buffers.mixed_requests(case)
    requests += [
        exactness.make_request(
            p, num_log_probs=None, sampling=SamplingParams(temperature=0.9, seed=2**62 + i, **filters)
        )
        for i, (p, filters) in enumerate(zip(exactness.prompts(), FILTERS, strict=True))
    ]
    truths = of_the_cpu(case, requests)
    case.script["make"] = None
    assert [out.tokens for out in run_all(case.engine, requests)] == truths
    for part, wanted in ((requests[:5], truths[:5]), (requests[5:], truths[5:])):
        case.script["make"] = exactness.oracle(
            {r.prompt_token_ids: ids for r, ids in zip(part, wanted, strict=True)}, "tree 31", seed=1
        )
        outs = run_all(case.engine, part)
        assert [out.tokens for out in outs] == wanted
        assert sum(out.stats.num_accepted_tokens for out in outs) > 20


def of_the_cpu(case: exactness.Case, requests: list[Request]) -> list[list[int]]:
    """The answers of the CPU's engine, without drafts."""
    config = VerifyConfig(
        target=case.script["directory"], draft="none", dtype="float32", compile=False, threads=1, device="cpu",
        max_batch=4, page_size=16,
    )  # fmt: skip
    engine = start_engine(config)
    try:
        return [out.tokens for out in run_all(engine, requests)]
    finally:
        engine.stop()
