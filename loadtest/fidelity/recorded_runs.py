"""Record runs of Tandem, with the steps of its workers and the times of its client, and store them as files.

Stored runs are not measured again, so that a campaign of an hour can be resumed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadtest.bench.systems_under_test import Failure, free_port
from loadtest.client.endpoint import Endpoint
from loadtest.client.open_loop import run_workload
from loadtest.client.records import Record, encode
from loadtest.client.workloads import mix_workload, warm_up
from loadtest.processes.systems import ServerCommand, running_server
from tandem.cli.fit_cost import read_logs
from tandem.core.clock import Clock, wall_ns
from tandem.core.config import ModelConfig
from tandem.engine.step_log import StepLog

NUM_WARM_UPS = 3


class RunConfig(NamedTuple):
    """Configuration of Tandem in a run; `flags` are those of `loadtest.processes.tandem_server`."""

    name: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """Load of a run: `count` requests of the mix at `rate` per second.

    `turn` distinguishes runs of equal loads.
    """

    seed: int
    count: int
    rate: float
    turn: int = 0


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run; `began_unix_s` is when its first request was due, in seconds since the epoch."""

    topology: str
    flags: tuple[str, ...]
    seed: int
    count: int
    rate: float
    turn: int
    began_unix_s: float
    wall_s: float
    records: tuple[Record, ...]


class StoredRun(NamedTuple):
    """A measured run and the steps of its workers since its beginning."""

    run: MeasuredRun
    logs: tuple[StepLog, ...]


async def kept(topology: RunConfig, load: RecordedLoad, directory: Path, clock: Clock) -> StoredRun:
    """Return the stored run in `directory`; measure and store it now if there is none.

    Raises Failure when a request failed or when the stored run was made with other flags, NotStarted.
    """
    name = f"{topology.name}-seed{load.seed}-{load.count}-rate{load.rate:g}-turn{load.turn}"
    file, steps = directory / f"{name}.json", directory / f"{name}.steps"
    if not file.exists():
        run = await _measure(topology, load, steps, clock)
        file.write_bytes(encode(run))
    run = msgspec.json.decode(file.read_bytes(), type=MeasuredRun)
    if run.flags != topology.flags:
        raise Failure(f"{file} was measured with {' '.join(run.flags)}, not {' '.join(topology.flags)}: move it away")
    return StoredRun(run, tuple(_from(run.began_unix_s, log) for log in read_logs([steps])))


async def _measure(topology: RunConfig, load: RecordedLoad, steps: Path, clock: Clock) -> MeasuredRun:
    sys.stderr.write(f"{topology.name}: {load.count} requests at {load.rate:g}/s, seed {load.seed}, turn {load.turn}\n")
    workload = mix_workload(load.seed, load.turn, load.count, load.rate)
    _empty(steps)
    with tempfile.TemporaryDirectory(prefix="tandem-measured-") as logs:
        async with running_server(_command(topology, steps), Path(logs)) as server:
            with server.turn() as endpoint:
                for number in range(NUM_WARM_UPS):
                    await run_workload(endpoint, warm_up(number), clock)
                began, began_unix_s = clock.now(), wall_ns() / 1e9
                records = await run_workload(endpoint, workload, clock)
                wall_s = clock.now() - began
    failed = [f"{record.name}: {record.error}" for record in records if record.error]
    if failed:
        raise Failure(f"{topology.name}: {len(failed)} requests failed, first {failed[0]}")
    return MeasuredRun(
        topology=topology.name,
        flags=topology.flags,
        seed=load.seed,
        count=load.count,
        rate=load.rate,
        turn=load.turn,
        began_unix_s=began_unix_s,
        wall_s=wall_s,
        records=tuple(msgspec.structs.replace(record, text="", tokens=None) for record in records),
    )


def _empty(steps: Path) -> None:
    """Delete what an aborted run left."""
    for stale in steps.glob("*.jsonl"):
        stale.unlink()


def _command(topology: RunConfig, steps: Path) -> ServerCommand:
    port, model = free_port(), ModelConfig().id
    flags: Sequence[str] = ("--served-model-name", model, "--step-log", str(steps), *topology.flags)
    return ServerCommand(
        name=topology.name,
        endpoint=Endpoint(url=f"http://127.0.0.1:{port}", model=model, extra={"return_token_ids": True}),
        command=(sys.executable, "-m", "loadtest.processes.tandem_server", "--port", str(port), *flags),
        can_pause=False,
    )


def _from(began_unix_s: float, log: StepLog) -> StepLog:
    """Return the log without the steps that began before the run, which are warm-ups."""
    mine = tuple(step for step in log.steps if step.at - step.record.measured_s >= began_unix_s)
    return StepLog(log.head, mine)
