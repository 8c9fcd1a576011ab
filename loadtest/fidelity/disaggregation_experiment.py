"""Compare monolithic prefill, chunked prefill and disaggregated prefill on the same mixed traffic, at equal resources.

    python -m loadtest experiment --directory DIR [--write loadtest/RESULTS.md]

The comparison runs in three places: the real engine on this machine's cores, the simulator with step times fitted on
it, and the simulator with the roofline of H200s. The first needs an idle machine for three quarters of an hour; results
that the directory holds already are not measured again. Sarathi-Serve (arXiv 2403.02310) published the first such
comparison, DistServe (arXiv 2401.09670) the second.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loadtest.bench.systems_under_test import Failure
from loadtest.fidelity.experiment_report import (
    CHUNKED,
    MONOLITHIC,
    SPLIT,
    ExperimentOutcome,
    ExperimentPlace,
    chart,
    insert,
    markdown,
)
from loadtest.fidelity.fidelity import TOPOLOGIES
from loadtest.fidelity.predictions import predicted, profile_from, simulated, times_of
from loadtest.fidelity.recorded_runs import RecordedLoad, RunConfig, StoredRun, kept
from loadtest.processes.systems import NotStarted
from tandem.core.clock import Clock, SystemClock
from tandem.core.config import Config, EngineConfig, GatewayConfig, Pool
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.cost.hardware import H200
from tandem.sim.cost.model_shapes import LLAMA_8B
from tandem.sim.cost.roofline import SERVING, Roofline
from tandem.sim.machines.profile import Profile
from tandem.workload.source import open_workload

REAL = {
    MONOLITHIC: RunConfig("mono", (*TOPOLOGIES["mixed"].flags, "--no-enable-chunked-prefill")),
    CHUNKED: TOPOLOGIES["mixed"],
    SPLIT: TOPOLOGIES["split"],
}
SEED_A, SEED_B = 1, 2
BURST = RecordedLoad(seed=3, count=60, rate=0.0)
GPU = Roofline(LLAMA_8B, H200, efficiency=SERVING)
GPU_POOLS: dict[str, dict[Pool, int]] = {
    MONOLITHIC: {"mixed": 4},
    CHUNKED: {"mixed": 4},
    SPLIT: {"prefill": 2, "decode": 2},
}
GPU_ENGINE = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=256)
GPU_RATE, GPU_COUNT, GPU_BURST = 9.0, 2000, 400
PATIENT = GatewayConfig(max_queued=100_000, queue_timeout_s=1e5, progress_timeout_s=1e5)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest experiment", description="Monolithic, chunked, disaggregated.")
    parser.add_argument("--directory", type=Path, required=True, help="where real runs are kept")
    parser.add_argument("--count", type=int, default=200, help="requests of a real run (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.6, help="of them per second (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="real runs of each way (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="replace the experiment's part of that file")
    args = parser.parse_args(argv)
    args.directory.mkdir(parents=True, exist_ok=True)
    try:
        places = asyncio.run(_places(args, SystemClock()))
    except (Failure, NotStarted) as error:
        sys.stderr.write(f"loadtest experiment: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    text = markdown(places)
    sys.stdout.write(text)
    if args.write:
        picture = args.write.with_name("experiment.svg")
        chart(places, picture)
        args.write.write_text(insert(args.write.read_text(), f"![what clients saw]({picture.name})\n\n{text}"))
    return 0


async def _places(args: argparse.Namespace, clock: Clock) -> list[ExperimentPlace]:
    load = RecordedLoad(SEED_B, args.count, args.rate)
    fit_on = await kept(REAL[CHUNKED], replace(load, seed=SEED_A), args.directory, clock)
    runs: dict[str, list[StoredRun]] = {name: [] for name in REAL}
    for turn in range(args.turns):
        for name, topology in REAL.items():
            runs[name].append(await kept(topology, replace(load, turn=turn), args.directory, clock))
    bursts = {name: await kept(topology, BURST, args.directory, clock) for name, topology in REAL.items()}
    threads = fit_on.logs[0].head.num_threads
    title = f"SmolLM2-135M in fp32, {args.count} requests of `mix` at {args.rate:g}/s, {args.turns} runs of each way"
    return [
        ExperimentPlace(f"Real, {threads} cores", title, [_real(name, runs[name], bursts[name]) for name in REAL]),
        _fitted(profile_from(fit_on, ""), runs, bursts),
        _gpus(),
    ]


def _real(name: str, runs: Sequence[StoredRun], burst: StoredRun) -> ExperimentOutcome:
    return ExperimentOutcome(name, [times_of(run.run.records) for run in runs], times_of(burst.run.records))


# ---- simulated


def _fitted(profile: Profile, runs: dict[str, list[StoredRun]], bursts: dict[str, StoredRun]) -> ExperimentPlace:
    """Simulate the configurations from one fit on chunked steps.

    Prompts computed whole are outside the measured range; two workers that share cores are not simulated, because each
    step then takes what the other leaves.
    """
    outcomes = []
    for name in (MONOLITHIC, CHUNKED):
        changed = _with_chunks(profile, name == CHUNKED)
        times = [predicted(changed, run, repetition) for repetition, run in enumerate(runs[name])]
        outcomes.append(ExperimentOutcome(name, times, predicted(changed, bursts[name], 0)))
    return ExperimentPlace("Simulated, the same cores", "step times fitted on a chunked run of another seed", outcomes)


def _with_chunks(profile: Profile, is_chunked: bool) -> Profile:
    workers = {}
    for pool, worker in profile.workers.items():
        engine = {**worker.settings["engine"], "enable_chunked_prefill": is_chunked}
        workers[pool] = replace(worker, settings={**worker.settings, "engine": engine})
    return replace(profile, workers=workers)


def _gpus() -> ExperimentPlace:
    outcomes = []
    for name, pools in GPU_POOLS.items():
        config = Config(engine=replace(GPU_ENGINE, enable_chunked_prefill=name != MONOLITHIC))
        workers = tuple((WorkerSpec.of(pool, GPU, config), number) for pool, number in pools.items())
        spec = ClusterSpec(workers=workers, gateway=PATIENT)
        usual, burst = (
            simulated(spec, open_workload("rag", seed=SEED_B, count=count, rate=rate))
            for count, rate in ((GPU_COUNT, GPU_RATE), (GPU_BURST, 0.0))
        )
        outcomes.append(ExperimentOutcome(name, [usual], burst))
    title = f"{GPU.shape.name} in bf16 on 4 {H200.name.upper()}, {GPU_COUNT} requests of `rag` at {GPU_RATE:g}/s"
    return ExperimentPlace("Simulated, 4 GPUs", title, outcomes)
