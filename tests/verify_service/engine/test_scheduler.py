"""Pages, slots and the queue: fair order, bounds, and nothing lost under any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import OverloadedError
from verify_service.cache.pages import SCRATCH_SLOT, PageAllocator, SlotAllocator
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.engine.completion_rate import MAX_WAIT_S, MIN_WAIT_S, WINDOW, CompletionRate
from verify_service.engine.scheduler import MAX_OVERTAKES, Scheduler


def make_sequence(sequence_id: int, prompt: int = 5, new_tokens: int = 7, *, client: str = "") -> SequenceState:
    request = Request(
        request_id=str(sequence_id), prompt_token_ids=(1,) * prompt, max_new_tokens=new_tokens, client=client
    )
    return SequenceState(sequence_id, request, lambda _: None, 0.0)


def make_scheduler(num_pages: int = 40, num_slots: int = 4, max_batch: int = 4, max_queue: int = 2) -> Scheduler:
    pages, slots = PageAllocator(num_pages, 4), SlotAllocator(num_slots)
    return Scheduler(pages, slots, max_batch=max_batch, max_queue=max_queue)


@given(st.lists(st.one_of(st.integers(1, 30), st.just(None)), max_size=40))
def test_pages_are_handed_out_once(requests: list[int | None]) -> None:
    """A number allocates so many tokens, None frees the oldest."""
    pages, held = PageAllocator(20, 4), list[list[int]]()
    for tokens in requests:
        if tokens is None:
            if held:
                pages.free(held.pop(0))
        elif pages.can_allocate(tokens):
            got = pages.allocate(tokens)
            assert len(got) == -(-tokens // 4)
            slots = pages.slots(got).tolist()
            assert len(slots) >= tokens
            assert SCRATCH_SLOT not in slots
            assert max(slots) < (pages.num_pages + 1) * pages.page_size
            held.append(got)
        else:
            assert pages.num_pages - pages.num_used < -(-tokens // 4)
        flat = [page for part in held for page in part]
        assert len(set(flat)) == len(flat) == pages.num_used
        assert 0 not in flat
    for part in held:
        pages.free(part)
    assert pages.num_used == 0


def test_lowest_pages_come_first() -> None:
    pages = PageAllocator(10, 4)
    first, second = pages.allocate(8), pages.allocate(4)
    assert (first, second) == ([1, 2], [3])
    pages.free(first)
    assert pages.allocate(12) == [1, 2, 4]


def test_slots_by_position_follow_the_pages() -> None:
    assert PageAllocator(10, 3).slots([5, 2]).tolist() == [15, 16, 17, 6, 7, 8]


def test_smaller_ones_overtake_what_has_no_room_yet() -> None:
    scheduler = make_scheduler(num_pages=8)
    big, bigger, small = make_sequence(1, 10, 10), make_sequence(2, 20, 10), make_sequence(3, 1, 1)
    for sequence in (big, bigger, small):
        scheduler.enqueue(sequence)
    assert scheduler.admit() == [big, small]  # 5 pages of 8, then 1
    scheduler.remove(big)
    assert scheduler.admit() == []  # 7 are free, 8 needed
    scheduler.remove(small)
    assert scheduler.admit() == [bigger]


def test_big_ones_are_not_starved_by_small_ones() -> None:
    """Small ones without end, two of which always run: a big one is overtaken so often and no more."""
    scheduler = make_scheduler(num_pages=8, max_queue=10)
    for i in range(2):
        scheduler.enqueue(make_sequence(i, 4, 4))
    scheduler.admit()
    big = make_sequence(2, 20, 10)
    scheduler.enqueue(big)
    overtakes, number = 0, 3
    while big in scheduler.waiting:
        scheduler.remove(scheduler.active[0])
        scheduler.enqueue(make_sequence(number, 4, 4))
        overtakes += len(scheduler.admit())
        number += 1
        assert number < 100, "it waits for ever"
    overtakes -= 1  # itself
    assert overtakes == MAX_OVERTAKES


def fair_order(sequences: list[SequenceState]) -> list[int]:
    """Who is admitted when, one at a time."""
    scheduler = make_scheduler(num_pages=1000, num_slots=1, max_batch=1, max_queue=len(sequences))
    for sequence in sequences:
        scheduler.enqueue(sequence)
    order: list[int] = []
    while scheduler.waiting:
        (admitted,) = scheduler.admit()
        order.append(admitted.sequence_id)
        scheduler.remove(admitted)
    return order


def test_a_client_with_a_hundred_requests_does_not_hold_up_another() -> None:
    crowd = [make_sequence(i, client="crowd") for i in range(100)]
    assert fair_order([*crowd, make_sequence(100, client="one")])[:3] == [0, 100, 1]


def test_shares_are_fair_in_tokens_not_in_requests() -> None:
    """One client's requests are four times as long as the other's."""
    long = [make_sequence(i, 20, 20, client="long") for i in range(20)]
    short = [make_sequence(100 + i, 5, 5, client="short") for i in range(80)]
    order = fair_order([*long, *short])
    for end in range(5, 101, 5):
        tokens_of_long = sum(40 for i in order[:end] if i < 100)
        tokens_of_short = sum(10 for i in order[:end] if i >= 100)
        assert abs(tokens_of_long - tokens_of_short) <= 40


def test_nobody_saves_up_by_being_away() -> None:
    """A client that comes back gets its share from now on, not what it did not use before."""
    scheduler = make_scheduler(num_pages=1000, num_slots=1, max_batch=1, max_queue=100)
    served: list[str] = []

    def serve() -> None:
        (admitted,) = scheduler.admit()
        served.append(admitted.request.client)
        scheduler.remove(admitted)

    for i in range(60):
        scheduler.enqueue(make_sequence(i, client="busy"))
    for _ in range(30):
        serve()
    for i in range(20):
        scheduler.enqueue(make_sequence(100 + i, client="away"))
    for _ in range(20):
        serve()
    assert 9 <= served[30:].count("away") <= 11


def test_newcomers_without_end_do_not_starve_those_who_wait() -> None:
    scheduler = make_scheduler(num_pages=1000, num_slots=1, max_batch=1, max_queue=100)
    first, second = make_sequence(0, client="patient"), make_sequence(1, client="patient")
    scheduler.enqueue(first)
    scheduler.enqueue(second)
    number = 2
    while second in scheduler.waiting:
        scheduler.enqueue(make_sequence(number, client=f"new {number}"))
        (admitted,) = scheduler.admit()
        scheduler.remove(admitted)
        number += 1
        assert number < 20, "it waits for ever"
    assert len(scheduler.waiting._charged) < 20  # nor is anything kept of them for ever


def test_who_gives_up_waiting_is_not_charged() -> None:
    scheduler = make_scheduler(num_pages=1000, num_slots=1, max_batch=1, max_queue=100)
    running = make_sequence(0, client="other")
    scheduler.enqueue(running)
    scheduler.admit()
    given_up = [make_sequence(i, client="a") for i in range(1, 20)]
    for sequence in given_up:
        scheduler.enqueue(sequence)
    scheduler.enqueue(make_sequence(20, client="b"))
    for sequence in given_up:
        scheduler.remove(sequence)
    scheduler.enqueue(make_sequence(21, client="a"))
    scheduler.enqueue(make_sequence(22, client="b"))
    scheduler.remove(running)
    order: list[int] = []
    while scheduler.waiting:
        (admitted,) = scheduler.admit()
        order.append(admitted.sequence_id)
        scheduler.remove(admitted)
    assert order == [20, 21, 22]


def test_the_completion_rate_says_when_to_come_back() -> None:
    pace = CompletionRate(0.0)
    pace.mark_busy(100.0)  # idle until then
    for i in range(10):
        pace.record(103.0 + 3.0 * i)
    assert pace.wait_s(32, 130.0) == pytest.approx(96.0)
    pace.mark_idle(130.0)
    pace.mark_busy(500.0)  # idle again, which is no slowness
    assert pace.wait_s(32, 500.0) == pytest.approx(96.0)
    assert pace.wait_s(32, 530.0) == pytest.approx(192.0)  # nothing has ended since
    for i in range(WINDOW + 1):
        pace.record(530.0 + 0.1 * i)
    assert pace.wait_s(32, 530.0 + 0.1 * WINDOW) == pytest.approx(3.2, rel=0.05)  # the present pace, not that of old
    assert pace.wait_s(0, 540.0) == MIN_WAIT_S
    assert pace.wait_s(10**9, 540.0) == MAX_WAIT_S
    pace = CompletionRate(0.0)
    pace.mark_busy(0.0)
    assert pace.wait_s(4, 2.0) == 8.0  # before the first end


def test_batch_and_slots_bound_the_running() -> None:
    for sizes in ({"max_batch": 2}, {"num_slots": 2}):
        scheduler = make_scheduler(max_queue=10, **sizes)
        sequences = [make_sequence(i) for i in range(4)]
        for sequence in sequences:
            scheduler.enqueue(sequence)
        assert scheduler.admit() == sequences[:2]
        assert len({s.state_slot for s in sequences[:2]} | {SCRATCH_SLOT}) == 3
        scheduler.remove(sequences[0])
        assert scheduler.admit() == [sequences[2]]


def test_queue_is_bounded_and_says_when_to_come_back() -> None:
    scheduler = make_scheduler(max_batch=2, max_queue=3)
    sequences = [make_sequence(i) for i in range(6)]
    for sequence in sequences[:2]:
        scheduler.enqueue(sequence)
    scheduler.admit()
    for sequence in sequences[2:5]:
        scheduler.enqueue(sequence)
    with pytest.raises(OverloadedError) as caught:
        scheduler.enqueue(sequences[5], retry_after_s=7.0)
    assert caught.value.retry_after_s == 7.0
    assert "3" in caught.value.message
    scheduler.remove(sequences[3])  # one that waits gives up
    scheduler.enqueue(sequences[5])
    scheduler.remove(sequences[0])
    scheduler.remove(sequences[1])
    assert scheduler.admit() == [sequences[2], sequences[4]]


def test_room_for_prompt_and_answer() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(1, prompt=3, new_tokens=6)
    scheduler.enqueue(sequence)
    scheduler.admit()
    assert len(sequence.slots) >= 3 + 6
    scheduler.remove(sequence)
    scheduler.remove(sequence)  # once more does no harm
    assert scheduler.pages.num_used == scheduler.slots.num_used == 0


def test_prefilling_and_decoding_are_in_order_of_arrival() -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(i) for i in range(4)]
    for sequence in sequences:
        scheduler.enqueue(sequence)
    scheduler.admit()
    sequences[1].base_length = sequences[2].base_length = 5
    assert scheduler.prefilling() == [sequences[0], sequences[3]]
    assert scheduler.decoding() == [sequences[1], sequences[2]]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("enqueue"), st.integers(1, 30)),
        st.tuples(st.just("admit"), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_nothing_leaks_under_any_order_of_events(operations: list[tuple[str, int]]) -> None:
    scheduler = make_scheduler(num_pages=24, num_slots=3, max_batch=3, max_queue=3)
    alive, arrived = list[SequenceState](), 0
    for what, value in operations:
        if what == "enqueue":
            sequence = make_sequence(arrived, prompt=value)
            try:
                scheduler.enqueue(sequence)
            except OverloadedError:
                assert len(scheduler.waiting) >= scheduler.max_queue
                continue
            arrived += 1
            alive.append(sequence)
        elif what == "admit":
            scheduler.admit()
        elif alive:
            scheduler.remove(alive.pop(value % len(alive)))
        assert sorted([*scheduler.active, *scheduler.waiting], key=lambda s: s.sequence_id) == alive
        assert [s.sequence_id for s in scheduler.waiting] == sorted(s.sequence_id for s in scheduler.waiting)
        assert len(scheduler.active) <= 3
        assert scheduler.pages.num_used == sum(len(s.pages) for s in scheduler.active)
        assert scheduler.slots.num_used == len({s.state_slot for s in scheduler.active}) == len(scheduler.active)
    for sequence in alive:
        scheduler.remove(sequence)
    assert scheduler.pages.num_used == scheduler.slots.num_used == 0
    assert not scheduler.active
    assert not scheduler.waiting
