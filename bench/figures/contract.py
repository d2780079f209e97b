"""Contract (c) of exactness: ids equal the target's own decoding wherever its two best logits are clearly apart.

Matrix products of different shapes round differently, so a closer call may fall either way. Such positions are listed
with their gap; any other difference is a failure. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.figures.values import Judgement

# Numeric noise of a logit, as a share of the largest one. float32: two implementations of the embedded target agree to
# 1e-5 on logits of about 20; the bound leaves a factor of a hundred for deeper models. Reduced formats lose more in
# every product: a rounding is 5e-4 of a value in float16, 4e-3 in bfloat16, and the bounds leave about ten of them.
NOISE = {"float32": 5e-5, "float16": 5e-3, "bfloat16": 3e-2}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A position where an answer and the reference part."""

    position: int  # in the answer, from 0
    token_id: int | None  # None: it ends here
    reference_id: int | None
    best_gap: float  # between the reference's two best logits
    chosen_gap: float  # between its best logit and that of the answer's token
    noise: float

    @property
    def is_failure(self) -> bool:
        """Whether rounding cannot explain it."""
        return self.chosen_gap > self.noise


def differences(
    answer: Sequence[int], expected: Sequence[int], judgements: Sequence[Judgement], *, dtype: str
) -> list[Difference]:
    """Where the answer leaves what the reference says, given the answer's own tokens up to there.

    `expected` is what the reference decoded by itself. Its first difference from the answer is always listed, even
    where the teacher-forced pass, which rounds differently from step-by-step decoding, sides with the answer.
    """
    first = first_difference(answer, expected)
    if first is not None and first >= min(len(answer), len(expected)):
        return [_misplaced_end(first, answer, expected)]
    found: list[Difference] = []
    for position, (token_id, judgement) in enumerate(zip(answer, judgements, strict=True)):
        sides_with_answer = judgement.best_id == token_id
        if sides_with_answer and position != first:
            continue
        found.append(
            Difference(
                position=position,
                token_id=token_id,
                reference_id=expected[position] if position == first else judgement.best_id,
                best_gap=judgement.best - judgement.second,
                # Where the pass sides with the answer, the reference's own choice was at most its second best.
                chosen_gap=judgement.best - (judgement.second if sides_with_answer else judgement.chosen),
                noise=NOISE[dtype] * abs(judgement.best),
            )
        )
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position where two sequences differ, the end of the shorter one included; None if they are equal."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def _misplaced_end(position: int, answer: Sequence[int], expected: Sequence[int]) -> Difference:
    """One of the two ends where the other goes on, after the same tokens: no rounding explains that."""
    ids = [tokens[position] if position < len(tokens) else None for tokens in (answer, expected)]
    gap = float("inf")
    return Difference(position=position, token_id=ids[0], reference_id=ids[1], best_gap=gap, chosen_gap=gap, noise=0.0)
