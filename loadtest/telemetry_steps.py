"""Rounds of engines' steps with and without telemetry, and what each step took; decides nothing."""

from __future__ import annotations

import threading
import urllib.request
from contextlib import ExitStack

import msgspec

from loadtest.telemetry_sides import Child, Place, pushing, sink

BATCHES = (1, 8, 32)
"""Sequences that decode at once."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class StepRound(msgspec.Struct, frozen=True, kw_only=True):
    """Of the whole process; no model computes in it."""

    steps: int
    wall_s: float
    cpu_s: float

    @property
    def step_s(self) -> float:
        """Processor time."""
        return self.cpu_s / self.steps


def measure_steps(place: Place, num_pairs: int, seconds: float) -> dict[int, list[tuple[StepRound, StepRound]]]:
    """Pairs (without, with) of fresh processes, by batch."""
    with ExitStack() as stack:
        receiver = sink(stack)
        sides = [
            Child(stack, place.command("telemetry_engine", "off", is_off=True), place.environment(is_off=True)),
            Child(
                stack,
                place.command("telemetry_engine", "on"),
                place.environment() | pushing(receiver.said["endpoint"]),
            ),
        ]
        found: dict[int, list[tuple[StepRound, StepRound]]] = {}
        for batch in BATCHES:
            pairs = [_pair(sides, batch, seconds, number) for number in range(-1, num_pairs)]
            found[batch] = pairs[1:]  # the first one warms up
    return found


def _pair(sides: list[Child], batch: int, seconds: float, number: int) -> tuple[StepRound, StepRound]:
    order = (0, 1) if number % 2 == 0 else (1, 0)
    rounds = {side: _round(sides[side], batch, seconds) for side in order}
    return rounds[0], rounds[1]


def _round(side: Child, batch: int, seconds: float) -> StepRound:
    """One scrape for each second of it, where there is something to scrape."""
    scraper = threading.Timer(seconds / 2, _scrape, [side.said.get("metrics")])
    scraper.start()
    try:
        return StepRound(**side.ask({"batch": batch, "seconds": seconds}))
    finally:
        scraper.join()


def _scrape(address: str | None) -> None:
    if address is not None:
        with _DIRECT.open(f"http://{address}/metrics", timeout=10) as response:
            response.read()
