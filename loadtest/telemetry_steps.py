"""Rounds of engines' steps with and without telemetry, and what each step took; decides nothing."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import msgspec

from loadtest.telemetry_sides import NUM_TURNS, TURNS, Child, Place, get, pushing, sink

BATCHES = (1, 8, 32)
"""Sequences that decode at once."""


class StepRound(msgspec.Struct, frozen=True, kw_only=True):
    """Of the whole process; no model computes in it."""

    steps: int
    wall_s: float
    cpu_s: float

    @property
    def step_s(self) -> float:
        """Processor time."""
        return self.cpu_s / self.steps


def measure_steps(place: Place, num_rounds: int, seconds: float) -> dict[int, list[tuple[StepRound, StepRound]]]:
    """Rounds (without, with) of fresh processes, by batch; each side has its turns for so many seconds in each. One
    process turns telemetry off and on, because no two have their memory laid out alike; where the side without is
    another commit there are two."""
    with ExitStack() as stack:
        # What one side leaves to be sent is not sent in the other's turn.
        pushed = pushing(sink(stack).said["endpoint"]) | {"OTEL_BSP_SCHEDULE_DELAY": "600000"}
        sides = [Child(stack, place.command("telemetry_engine", "on"), place.environment() | pushed)] * 2
        if place.before is not None:
            command = place.command("telemetry_engine", "off", is_off=True)
            sides[0] = Child(stack, command, place.environment(is_off=True))
        found: dict[int, list[tuple[StepRound, StepRound]]] = {}
        for batch in BATCHES:
            _round(sides, batch, seconds)  # warms up
            found[batch] = [_round(sides, batch, seconds) for _ in range(num_rounds)]
    return found


def _round(sides: list[Child], batch: int, seconds: float) -> tuple[StepRound, StepRound]:
    asked = {"batch": batch, "seconds": seconds / NUM_TURNS}
    scraper = threading.Thread(target=get, args=[f"http://{sides[1].said['metrics']}/metrics"])
    turns: tuple[list[StepRound], list[StepRound]] = ([], [])
    for number, side in enumerate(TURNS, 1):
        if number == len(TURNS):
            scraper.start()
        turns[side].append(StepRound(**sides[side].ask({**asked, "telemetry": side == 1})))
    scraper.join()
    sent_s = sides[1].ask({"flush": True})["cpu_s"]
    off, on = (_sum(each) for each in turns)
    return off, msgspec.structs.replace(on, cpu_s=on.cpu_s + sent_s)


def _sum(turns: list[StepRound]) -> StepRound:
    return StepRound(
        steps=sum(turn.steps for turn in turns),
        wall_s=sum(turn.wall_s for turn in turns),
        cpu_s=sum(turn.cpu_s for turn in turns),
    )
