"""Implement `tandem fit-cost`: fit a profile for the simulator on the step logs of real workers."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tandem.core.errors import invalid_request
from tandem.core.settings import Resolved
from tandem.engine.step_log import StepLog, decode_log
from tandem.sim.machines.profile import FitQuality, Profile, WorkerProfile, encode_profile, fit_worker, pool_named


def run(_resolved: Resolved, args: argparse.Namespace) -> int:
    """Fit a profile on the step logs, write it to `--output` and print a summary; returns the exit code 0.

    Raises TandemError for numbers that no cluster has, for logs that cannot be read or fitted, and for an output that
    cannot be written."""
    if not 0 <= args.latency_ms < math.inf:
        raise invalid_request(f"--latency-ms {args.latency_ms:g} must be 0 or more")
    if not 0 < args.bandwidth < math.inf:
        raise invalid_request(f"--bandwidth {args.bandwidth:g} must be more than 0")
    logs = read_logs(args.logs)
    fitted = fit_all(logs)
    profile = profile_of(logs, fitted, args.latency_ms / 1e3, args.bandwidth, args.note)
    try:
        args.output.write_text(encode_profile(profile))
    except OSError as error:
        raise invalid_request(f"cannot write --output {args.output}: {error.strerror}") from error
    sys.stdout.write("\n".join([*(_summary(pool, *found) for pool, found in fitted.items()), str(args.output), ""]))
    return 0


def read_logs(paths: Iterable[Path]) -> list[StepLog]:
    """Read step logs, the records of each step's work and duration that workers write.

    `paths`: files, or directories of `*.jsonl` files. Raises TandemError if a file cannot be read or a directory has
    none."""
    logs = []
    for path in paths:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise invalid_request(
                f"{path} has no step log (*.jsonl); workers write them to the directory of --step-log"
            )
        for file in files:
            try:
                with file.open(encoding="utf-8") as lines:
                    log = decode_log(lines, str(file))
                pool_named(log.head.pool)
                logs.append(log)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise invalid_request(f"cannot read step log {file}: {reason}") from error
    return logs


Fitted = dict[str, tuple[WorkerProfile, FitQuality]]


def fit_all(logs: Iterable[StepLog]) -> Fitted:
    """Fit one profile of step costs per pool, to the logs of all workers of the pool.

    Returns the profile and the quality of the fit, by pool. Raises TandemError if there are too few steps to fit."""
    by_pool: dict[str, list[StepLog]] = {}
    for log in logs:
        by_pool.setdefault(log.head.pool, []).append(log)
    return {pool: fit_worker(found) for pool, found in sorted(by_pool.items())}


def profile_of(logs: Iterable[StepLog], fitted: Fitted, latency_s: float, bandwidth: float, note: str) -> Profile:
    """Build the simulator's profile of a cluster from the fitted pools.

    `logs`: the step logs. `fitted`: result of `fit_all` for these logs. `latency_s`: seconds between client and worker,
    in one direction. `bandwidth`: bytes per second of a worker's link. `note`: what was measured, for the profile's
    provenance. Raises TandemError if the logs are of several models."""
    heads = [log.head for log in logs]
    models = sorted({head.model for head in heads})
    if len(models) > 1:
        raise invalid_request(f"the step logs are of several models ({', '.join(models)}): fit each model apart")
    kinds = Counter(f"{head.pool} with {head.num_threads} threads" for head in heads)
    steps = sum(worker.num_steps for worker, _ in fitted.values())
    provenance = f"fitted on {steps} steps of {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}"
    return Profile(
        model=models[0],
        workers={pool_named(pool): worker for pool, (worker, _) in fitted.items()},
        latency_s=latency_s,
        bandwidth=bandwidth,
        provenance=f"{provenance}; {note}" if note else provenance,
    )


def _summary(pool: str, worker: WorkerProfile, quality: FitQuality) -> str:
    cost = worker.cost
    return (
        f"{pool}: {worker.num_steps} steps; {cost.base_s * 1e3:.2f} ms, and {cost.prefill_token_s * 1e6:.1f} us per "
        f"prompt token, {cost.decode_seq_s * 1e6:.1f} us per sequence, {cost.decode_context_s * 1e9:.2f} ns per token "
        f"of context, {cost.prefill_pair_s * 1e9:.3f} ns per pair; predicts {quality.total:.1%} of all time, half of "
        f"the steps within {quality.median:.1%}, 99 % within {quality.p99:.0%}"
    )
