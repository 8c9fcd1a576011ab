"""Measure how fast one core is, by timing a small piece of work that is always the same.

    python -m loadtest.common.core_speed --core N

The program does the piece every few milliseconds, beside whatever else runs on the core, and reports how long one
takes. A rented machine shares its cores with other tenants, whose work makes ours take half as long again, or twice as
long, within seconds. A line of stdin is answered with the number of pieces so far and the processor time that they
took; the program ends with stdin.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from random import Random

PAUSE_S = 0.004
_NUM_OBJECTS = 20_000
"""Number of objects, some megabytes: more than a core's own cache, because a gateway's work also waits for memory."""
_PIECE = 300
"""Number of objects that a piece touches: a quarter of a millisecond, 6 % of the core."""


class Piece:
    """A piece of work that is always the same and typical of an interpreter: calls, attributes, small short-lived
    objects."""

    def __init__(self) -> None:
        self._objects = [_Object(number, str(number)) for number in range(_NUM_OBJECTS)]
        Random(1).shuffle(self._objects)
        self._at = 0

    def do(self) -> int:
        found: dict[int, tuple[str, int]] = {}
        for each in self._objects[self._at : self._at + _PIECE]:
            key = each.plus(self._at) & 1023
            found[key] = each.name, key
        self._at = (self._at + _PIECE) % (_NUM_OBJECTS - _PIECE)
        return len(found)


class _Object:
    __slots__ = ("name", "number")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name

    def plus(self, number: int) -> int:
        return self.number + number


def main() -> int:
    parser = argparse.ArgumentParser(prog="loadtest.common.core_speed")
    parser.add_argument("--core", type=int, required=True)
    os.sched_setaffinity(0, {parser.parse_args().core})
    piece, count, seconds = Piece(), 0, 0.0
    _write(count, seconds)
    while True:
        if select.select([sys.stdin], [], [], PAUSE_S)[0]:
            if not sys.stdin.readline():
                return 0
            _write(count, seconds)
        began = time.thread_time()
        piece.do()
        seconds += time.thread_time() - began
        count += 1


def _write(count: int, seconds: float) -> None:
    sys.stdout.write(json.dumps({"pieces": count, "seconds": seconds}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
