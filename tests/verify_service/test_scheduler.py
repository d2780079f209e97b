"""Pages, slots and the queue: order of arrival, bounds, and nothing lost under any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import OverloadedError
from verify_service.cache.pages import SCRATCH_SLOT, PageAllocator, SlotAllocator
from verify_service.request import Request
from verify_service.scheduler import Scheduler
from verify_service.sequence import Sequence


def make_sequence(sequence_id: int, prompt: int = 5, new_tokens: int = 7) -> Sequence:
    request = Request(request_id=str(sequence_id), prompt=(1,) * prompt, max_new_tokens=new_tokens)
    return Sequence(sequence_id, request, lambda _: None, 0.0)


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


def test_first_come_first_served_even_where_a_later_one_would_fit() -> None:
    scheduler = make_scheduler(num_pages=8)
    big, bigger, small = make_sequence(1, 10, 10), make_sequence(2, 20, 10), make_sequence(3, 1, 1)
    for sequence in (big, bigger, small):
        scheduler.enqueue(sequence)
    assert scheduler.admit() == [big]
    assert scheduler.admit() == []  # the head does not fit, so nobody overtakes it
    scheduler.remove(big)
    assert scheduler.admit() == [bigger]
    scheduler.remove(bigger)
    assert scheduler.admit() == [small]


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
        scheduler.enqueue(sequences[5])
    assert caught.value.retry_after_s is not None
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
    alive, arrived = list[Sequence](), 0
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
        if scheduler.active and scheduler.waiting:
            assert max(s.sequence_id for s in scheduler.active) < scheduler.waiting[0].sequence_id
        assert len(scheduler.active) <= 3
        assert scheduler.pages.num_used == sum(len(s.pages) for s in scheduler.active)
        assert scheduler.slots.num_used == len({s.state_slot for s in scheduler.active}) == len(scheduler.active)
    for sequence in alive:
        scheduler.remove(sequence)
    assert scheduler.pages.num_used == scheduler.slots.num_used == 0
    assert not scheduler.active
    assert not scheduler.waiting
