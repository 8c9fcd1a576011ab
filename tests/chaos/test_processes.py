"""Real processes under a load without a pause, while faults strike one after another: every answer is that of an
undisturbed run, and in the end nothing is left anywhere; never with fewer workers left than can serve.

A failure prints the seed. `TANDEM_CHAOS_SEED=N` runs the script of faults and the load of that seed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.chaos.load import Load, Outcome, Seen, Target, undisturbed
from tests.chaos.random_requests import ChaosRequest, random_requests
from tests.chaos.script import KINDS, Fault, script
from tests.chaos.world import KEYS, SETTINGS, World, whole_world
from tests.e2e.gateway.processes import Redis, cluster

Log = Callable[[str], None]
SEED = int(os.environ.get("TANDEM_CHAOS_SEED", "6"))
NUM_REQUESTS = 120
NUM_CLIENTS = 16
CALM_S = 20.0
NUM_FAULTS = 2 * len(KINDS)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(0)]


class Spell(NamedTuple):
    """A time in which something struck, or nothing. Seconds of the monotonic clock."""

    what: str
    began: float
    ended: float


def expect(directory: Path, redis: Redis, model: Path, requests: list[ChaosRequest]) -> list[Seen]:
    """The answers of one worker that does all of it."""
    settings = (*SETTINGS, "--namespace", "undisturbed", "--auth", "off")
    with cluster(directory, redis.url, model, *settings) as programs:
        programs.worker("m", "mixed")
        gateway = programs.gateway("calm", "--auth", "off")
        programs.wait_serving()
        return undisturbed(Target("calm", gateway.url, gateway.grpc_target), requests, "")


def run(directory: Path, redis: Redis, model: Path, seed: int, faults: list[Fault]) -> list[str]:
    """Inject all faults, log what happens, and return the problems that were found."""
    began = time.monotonic()

    def log(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - began:7.2f} s  {text}\n")
        sys.stdout.flush()

    log(f"seed {seed}: TANDEM_CHAOS_SEED={seed} runs this again")
    requests = random_requests(seed, NUM_REQUESTS)
    expected = expect(directory, redis, model, requests)
    with whole_world(directory, redis, model, log) as world:
        world.start()
        load = Load(requests, expected, list(KEYS.values()), world.targets)
        log("whole")
        load.start(seed, NUM_CLIENTS)
        spells: list[Spell] = []
        try:
            spells.append(calm())
            for fault in faults:
                spells.append(strike(world, load, fault, log))
        finally:
            load.stop()
        log("load ended")
        world.nothing_is_left()
        summary(load.report.outcomes, spells, log)
        return [*load.report.problems(), *world.errors()]


def calm() -> Spell:
    """What the load itself makes clients wait for, to compare with."""
    began = time.monotonic()
    time.sleep(CALM_S)
    return Spell("nothing", began, time.monotonic())


def strike(world: World, load: Load, fault: Fault, log: Log) -> Spell:
    time.sleep(fault.pause_s)
    began = time.monotonic()
    num_before = len(load.report.problems())
    log(f"{fault}; {load.report.num_open} requests are under way")
    world.strike(fault)
    for problem in load.report.problems()[num_before:]:
        log(f"    {problem}")
    return Spell(fault.kind, began, time.monotonic())


def summary(outcomes: list[Outcome], spells: list[Spell], log: Log) -> None:
    log("waits for the first event of streams that began until all was whole again, p50, p90 and longest:")
    for what in dict.fromkeys(spell.what for spell in spells):
        these = [spell for spell in spells if spell.what == what]
        waits = sorted(
            one.wait_s for one in outcomes if one.wait_s and any(x.began <= one.began < x.ended for x in these)
        )
        percentiles = [f"{waits[int(share * (len(waits) - 1))]:6.2f}" for share in (0.5, 0.9, 1.0) if waits]
        lasted_s = sum(spell.ended - spell.began for spell in these)
        log(f"    {what:20} {lasted_s:6.1f} s {len(waits):5} streams {' '.join(percentiles)} s")
    paths = {path: sum(1 for one in outcomes if one.path == path) for path in sorted({one.path for one in outcomes})}
    num_resent = sum(one.num_resent for one in outcomes)
    num_moved = sum(";retries=" in one.path for one in outcomes)
    log(
        f"{len(outcomes)} requests, {sum(one.problem is not None for one in outcomes)} with a problem; by path: {paths}"
    )
    log(f"{num_resent} sent again by their clients, {num_moved} went on elsewhere")
    waits, stalls = (max(getattr(one, name) for one in outcomes) for name in ("wait_s", "stall_s"))
    log(f"at longest {waits:.2f} s to the first event of a stream, {stalls:.2f} s between two")


def test_many_faults(tmp_path: Path, redis: Redis, model: Path) -> None:
    assert run(tmp_path, redis, model, SEED, script(SEED, NUM_FAULTS)) == []
