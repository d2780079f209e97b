"""Ended calls are collected although a service holds hundreds of thousands of objects."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, weakref
import draftwood.garbage

model = [[] for _ in range(400_000)]
if {freezes}:
    draftwood.garbage.freeze_startup()

class Call:
    pass

def begin():
    call = Call()
    call.itself = call
    return call

ended = []
for _ in range(40):  # each call lives long enough to be among the oldest
    calls = [begin() for _ in range(100)]
    gc.collect(1)
    ended += [weakref.ref(call) for call in calls]
    del calls
kept = [[] for _ in range(3_000)]  # so many are alive before the collector looks again
alive = sum(ref() is not None for ref in ended)
print(alive)
"""


def alive(*, freezes: bool) -> int:
    command = [sys.executable, "-c", SCRIPT.format(freezes=freezes)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_ended_calls_do_not_pile_up() -> None:
    assert alive(freezes=True) < 1000
    assert alive(freezes=False) == 4000, "what this is about"
