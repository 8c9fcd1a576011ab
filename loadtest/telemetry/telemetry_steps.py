"""Measure the processor time of an engine's steps with telemetry and without, in alternating turns."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec

from loadtest.common.paired_comparison import Timed
from loadtest.processes.telemetry_processes import (
    NUM_TURNS,
    TURNS,
    Child,
    CoreSpeed,
    ProcessPlacement,
    get,
    pushing,
    sink,
)

BATCHES = (1, 8, 32)
"""Numbers of sequences that decode at once."""


class StepTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one side in one turn, and their cost.

    `cpu_s`: processor seconds of the whole process, in which no model computes. For the side with telemetry it includes
    this turn's share of a scrape and of sending the spans of its round.
    """

    steps: int
    cpu_s: float
    core_speed_s: float
    """Seconds that the constant reference work took on that core in that turn."""

    @property
    def step(self) -> Timed:
        """Return the processor seconds of one step, with the core's speed in this turn."""
        return Timed(self.cpu_s / self.steps, self.core_speed_s)


def measure_steps(
    place: ProcessPlacement, num_rounds: int, seconds: float
) -> dict[int, list[tuple[StepTurn, StepTurn]]]:
    """Run rounds of steps in new processes; return the turns by batch size, as pairs (without, with telemetry).

    Each side has turns of `seconds` seconds in all in a round. One process turns telemetry off and on, because the
    memory layout of two processes differs; if the side without is another commit, there are two.
    """
    with ExitStack() as stack:
        core_speed = CoreSpeed(place, stack)
        # What one side leaves to be sent is not sent in the other's turn.
        pushed = pushing(sink(stack).ready["endpoint"]) | {"OTEL_BSP_SCHEDULE_DELAY": "600000"}
        sides = [Child(stack, place.command("telemetry_engine", "on"), place.environment() | pushed)] * 2
        if place.before is not None:
            command = place.command("telemetry_engine", "off", is_off=True)
            sides[0] = Child(stack, command, place.environment(is_off=True))
        found: dict[int, list[tuple[StepTurn, StepTurn]]] = {}
        for batch in BATCHES:
            _round(sides, core_speed, batch, seconds)  # warms up
            found[batch] = [pair for _ in range(num_rounds) for pair in _round(sides, core_speed, batch, seconds)]
    return found


def _round(sides: list[Child], core_speed: CoreSpeed, batch: int, seconds: float) -> list[tuple[StepTurn, StepTurn]]:
    """Return turns (without, with) in pairs of neighbours."""
    request = {"batch": batch, "seconds": seconds / NUM_TURNS}
    turns: tuple[list[StepTurn], list[StepTurn]] = ([], [])
    core_speed.lap()
    for side in TURNS:
        ready = sides[side].request({**request, "telemetry": side == 1})
        turns[side].append(StepTurn(steps=ready["steps"], cpu_s=ready["cpu_s"], core_speed_s=core_speed.lap()))
    instrumented = sides[1]
    before_s = instrumented.cpu_s()
    get(f"http://{instrumented.ready['metrics']}/metrics")
    instrumented.request({"flush": True})
    shared_s = (instrumented.cpu_s() - before_s) / NUM_TURNS
    return [(off, msgspec.structs.replace(on, cpu_s=on.cpu_s + shared_s)) for off, on in zip(*turns, strict=True)]
