"""What the device loop does turn by turn: prompts beside answers, deadlines, cancellations, drain, health.

Passes and turns are counted on a clock of the test's; no model runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median

import pytest

from draftwood.config import MAX_DRAFT_TIMEOUT_MS
from draftwood.errors import DeadlineError, UnavailableError
from tests.verify_service.fake_drafter import PATIENCE_S, until
from tests.verify_service.fake_runner import Loop
from verify_service.core.events import Failed, Finished
from verify_service.core.sequence import PREFILL_CHUNK
from verify_service.engine.engine import PATIENCE_S as HEALTH_PATIENCE_S
from verify_service.engine.prefill_budget import MAX_PAUSE

LONG = 1500

MakeLoop = Callable[..., Loop]


@pytest.fixture
def make_loop() -> Iterator[MakeLoop]:
    loops: list[Loop] = []

    def make(**values: float) -> Loop:
        loops.append(Loop(**values))  # pyright: ignore[reportArgumentType]
        return loops[-1]

    yield make
    for loop in loops:
        loop.stop()


def eight_and_a_long_prompt(make_loop: MakeLoop, *, prefill_s: float, step_s: float) -> tuple[Loop, list[float]]:
    """Eight answers, beside which a long prompt comes in their third step; seconds between their steps meanwhile."""
    loop = make_loop(prefill_s=prefill_s, step_s=step_s, max_batch=9)
    for i in range(8):
        loop.submit(f"running {i}", new_tokens=500)
    loop.on_pass(3, lambda: loop.submit("long", prompt=LONG, new_tokens=2))
    ends: list[float] = []
    for number in range(600):
        loop.on_pass(number, lambda: ends.append(loop.runner.now))
    loop.start()
    for i in range(8):
        assert len(loop.collect(f"running {i}").tokens) == 500
    assert isinstance(loop.collect("long").end, Finished)
    passes = loop.runner.passes
    prefills = [i for i in loop.passes_of("long") if passes[i][0] == "prefill"]
    steps = [ends[i] for i in range(prefills[0] - 1, prefills[-1] + 2) if passes[i][0] == "step"]
    return loop, [b - a for a, b in pairwise(steps)]


@pytest.mark.parametrize("prefill_s", [0.5, 1.0, 2.0, 4.0])
def test_a_long_prompt_leaves_eight_answers_their_pace(make_loop: MakeLoop, prefill_s: float) -> None:
    loop, gaps = eight_and_a_long_prompt(make_loop, prefill_s=prefill_s, step_s=1.0)
    assert sum(gaps) / len(gaps) < 1.5
    assert median(gaps) <= 1.5
    passes = loop.runner.passes
    numbers = [i for i in loop.passes_of("long") if passes[i][0] == "prefill"]
    lengths = [dict(passes[i][1])["long"] for i in numbers]
    assert sum(lengths) == LONG
    assert max(lengths) <= PREFILL_CHUNK
    assert all(b - a > 1 for a, b in pairwise(numbers)), "two passes without a step between them"


def test_a_prompt_goes_on_however_slow_its_passes_are(make_loop: MakeLoop) -> None:
    loop, _ = eight_and_a_long_prompt(make_loop, prefill_s=100.0, step_s=1.0)
    numbers = [i for i in loop.passes_of("long") if loop.runner.passes[i][0] == "prefill"]
    assert max(b - a for a, b in pairwise(numbers)) == MAX_PAUSE + 1


def test_prompts_take_as_much_time_as_answers_where_there_are_as_many(make_loop: MakeLoop) -> None:
    loop = make_loop(max_batch=4)
    for i in range(2):
        loop.submit(f"running {i}", new_tokens=100)
        loop.on_pass(2, lambda i=i: loop.submit(f"long {i}", prompt=640, new_tokens=50))
    loop.start()
    for i in range(2):
        loop.collect(f"running {i}")
        loop.collect(f"long {i}")
    kinds = [kind for kind, _ in loop.runner.passes]
    first, last = kinds.index("prefill", 1), len(kinds) - 1 - kinds[::-1].index("prefill")
    # While both prompts are there every step is followed by a pass; the second alone beside three gets its 40 %.
    assert kinds[first : first + 20] == ["prefill", "step"] * 10
    assert kinds[first : last + 1].count("prefill") == 20


def test_short_prompts_share_a_pass(make_loop: MakeLoop) -> None:
    loop = make_loop()
    for i in range(8):
        loop.submit(f"{i}", prompt=17 + i)
    loop.start()
    for i in range(8):
        loop.collect(f"{i}")
    assert loop.runner.passes[0] == ("prefill", [(f"{i}", 17 + i) for i in range(8)])
    assert loop.runner.passes[1][0] == "step"


def test_a_pass_is_no_larger_than_allowed_with_its_padding(make_loop: MakeLoop) -> None:
    loop = make_loop(prefill_tokens=100)
    for i, length in enumerate((3, 50, 10, 200)):
        loop.submit(f"{i}", prompt=length, new_tokens=1)
    loop.start()
    for i in range(4):
        loop.collect(f"{i}")
    assert [parts for _, parts in loop.runner.passes] == [
        [("0", 3), ("1", 50)],  # a third would be padded to 50
        [("2", 10)],
        [("3", 64)],
        [("3", 64)],
        [("3", 64)],
        [("3", 8)],
    ]


def test_a_deadline_ends_a_request_in_every_phase_within_one_step(make_loop: MakeLoop) -> None:
    """Time 1 a pass. All are taken at 0: one is decoded, one prefilled beside it, one waits."""
    loop = make_loop(max_batch=2)
    loop.submit("decoded", new_tokens=1000, timeout_s=9.5)
    loop.submit("prefilled", prompt=5000, timeout_s=9.5)
    loop.submit("waiting", timeout_s=4.5)
    loop.submit("last")
    loop.start()
    messages = {name: str(loop.error(name)) for name in ("decoded", "prefilled", "waiting")}
    assert "was being decoded" in messages["decoded"]
    assert "was being prefilled" in messages["prefilled"]
    assert "waited for its turn" in messages["waiting"]
    assert isinstance(loop.collect("last").end, Finished)
    ends = 10  # the turn that begins at 10 is the first after 9.5
    assert max(loop.passes_of("decoded")) < ends
    assert max(loop.passes_of("prefilled")) < ends
    assert loop.passes_of("waiting") == []
    assert min(loop.passes_of("last")) == ends


def test_a_waiting_request_hears_of_its_deadline_at_once_and_when_to_come_back(make_loop: MakeLoop) -> None:
    loop = make_loop(max_batch=1)
    heard: list[float] = []
    loop.submit("running", new_tokens=30)
    loop.submit("waiting", timeout_s=5.0)
    for number in range(20):
        loop.on_pass(number, lambda: heard.append(len(loop.engine.scheduler.waiting)))
    loop.start()
    error = loop.error("waiting")
    loop.collect("running")
    assert isinstance(error, DeadlineError)
    assert error.retry_after_s is not None
    assert heard[:6] == [1] * 5 + [0]


def test_a_cancelled_request_is_gone_within_one_step(make_loop: MakeLoop) -> None:
    loop = make_loop(max_batch=2)
    loop.submit("decoded", new_tokens=1000)
    loop.submit("prefilled", prompt=5000)
    loop.submit("waiting")
    loop.submit("last")
    loop.on_pass(4, lambda: [loop.cancel(name) for name in ("waiting", "prefilled", "decoded")])
    loop.start()
    assert isinstance(loop.collect("last").end, Finished)
    assert loop.runner.passes[4][0] == "prefill"
    assert max(loop.passes_of("decoded") + loop.passes_of("prefilled")) == 5, "the step of the same turn"
    assert loop.passes_of("waiting") == []
    assert min(loop.passes_of("last")) == 6
    assert set(loop.coordinator.closed) >= {loop.ids[name] for name in ("decoded", "prefilled")}


def test_a_drain_refuses_new_requests_and_lets_accepted_ones_end(make_loop: MakeLoop) -> None:
    loop = make_loop(max_batch=1)
    loop.submit("running", new_tokens=20)
    loop.submit("waiting")
    drained, refused = list[bool](), list[UnavailableError]()
    drain = threading.Thread(target=lambda: drained.append(loop.engine.drain(PATIENCE_S)))

    def begin() -> None:
        drain.start()
        until(lambda: loop.engine._retry_after_s is not None)
        with pytest.raises(UnavailableError) as caught:
            loop.submit("late")
        refused.append(caught.value)

    loop.on_pass(3, begin)
    loop.start()
    for name, length in (("running", 20), ("waiting", 4)):
        answer = loop.collect(name)
        assert isinstance(answer.end, Finished)
        assert len(answer.tokens) == length
    drain.join()
    assert drained == [True]
    assert refused[0].retry_after_s == PATIENCE_S


def test_what_a_drain_has_no_time_for_fails_with_the_stop(make_loop: MakeLoop) -> None:
    loop = make_loop(max_batch=1)
    gate = threading.Event()
    loop.submit("running", new_tokens=20)
    loop.submit("waiting")
    loop.on_pass(3, lambda: gate.wait(PATIENCE_S))
    loop.start()
    assert not loop.engine.drain(0.0)
    stop = threading.Thread(target=loop.engine.stop)
    stop.start()
    gate.set()
    for name in ("running", "waiting"):
        end = loop.collect(name).end
        assert isinstance(end, Failed)
        assert isinstance(end.error, UnavailableError)
        assert "going down" in end.error.message
    stop.join()


def test_a_drain_that_comes_behind_a_stop_does_not_wait(make_loop: MakeLoop) -> None:
    """Two signals in quick succession may be acted on in this order, while a step is still running."""
    loop, gate, is_running = make_loop(max_batch=1), threading.Event(), threading.Event()

    def run() -> None:
        is_running.set()
        assert gate.wait(PATIENCE_S)

    loop.submit("running", new_tokens=20)
    loop.on_pass(3, run)
    loop.start()
    assert is_running.wait(PATIENCE_S)
    stop = threading.Thread(target=loop.engine.stop)
    stop.start()
    until(lambda: loop.engine._retry_after_s is not None)
    drained = list[bool]()
    drain = threading.Thread(target=lambda: drained.append(loop.engine.drain(10 * PATIENCE_S)))
    drain.start()
    gate.set()
    stop.join(PATIENCE_S)
    drain.join(PATIENCE_S)
    assert drained == [False]


def test_a_stuck_loop_is_seen(make_loop: MakeLoop) -> None:
    loop, gate, is_stuck = make_loop(), threading.Event(), threading.Event()
    engine = loop.engine

    def stick() -> None:
        is_stuck.set()
        assert gate.wait(PATIENCE_S)

    loop.submit("stuck")
    loop.on_pass(2, stick)
    loop.start()
    assert is_stuck.wait(PATIENCE_S)
    assert engine.is_turning(10.0)
    loop.runner.now += 10.0
    assert not engine.is_turning(10.0)
    gate.set()
    loop.collect("stuck")
    until(lambda: engine.is_turning(10.0))
    loop.runner.now += 1000.0  # nothing to do is no standstill
    assert engine.is_turning(10.0)


def test_a_long_prefill_is_no_standstill(make_loop: MakeLoop) -> None:
    """Its passes take longer together than the patience of the health check, each of them less."""
    loop, seen = make_loop(prefill_s=9.0), list[bool]()
    loop.submit("long", prompt=6400, new_tokens=1)
    for number in range(100):
        loop.on_pass(number, lambda: seen.append(loop.engine.is_turning(10.0)))
    loop.start()
    loop.collect("long")
    assert seen == [True] * 100


def test_a_step_that_waits_for_its_draft_is_no_stuck_loop(make_loop: MakeLoop) -> None:
    """As long as --draft-timeout-ms lets it, and as long again for its other stages."""
    loop, turning = make_loop(step_s=2 * MAX_DRAFT_TIMEOUT_MS / 1e3 - 2.0), list[bool]()
    loop.submit("answer", new_tokens=3)
    for number in (1, 2):
        loop.on_pass(number, lambda: turning.append(loop.engine.is_turning(HEALTH_PATIENCE_S)))
    loop.start()
    assert isinstance(loop.collect("answer").end, Finished)
    assert turning == [True, True]
