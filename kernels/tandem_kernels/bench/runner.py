"""Runs checks and cases one after the other within a budget of time; knows nothing of what they compute."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from tandem_kernels.bench.case import Bench, BenchCase, BenchRow, NotHere, Work, share_of
from tandem_kernels.bench.checks import CheckResult, KernelCheck, run_check
from tandem_kernels.bench.roofline import DeviceLimits
from tandem_kernels.bench.timing import KernelTiming

Told = Callable[[str], None]


@dataclass(slots=True)
class RunOutcome:
    """`left_out` and `failed` say of a case why it has no row."""

    verdicts: list[CheckResult] = field(default_factory=list)
    rows: list[BenchRow] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return not self.failed and all(verdict.is_right for verdict in self.verdicts)


def run_checks(bench: Bench, checks: Iterable[KernelCheck], ends_at: float, outcome: RunOutcome, told: Told) -> None:
    """Until `ends_at` of the stopwatch."""
    for check in checks:
        if bench.stopwatch.now() > ends_at:
            outcome.left_out[check.name] = "no time left"
            continue
        verdict = run_check(check, bench)
        outcome.verdicts.append(verdict)
        told(f"{'right' if verdict.is_right else 'WRONG'}  {check.name}: {verdict.failure or f'{verdict.error:.1e}'}")
        _forget(bench)


def run_cases(
    bench: Bench, limits: DeviceLimits, cases: Iterable[BenchCase], ends_at: float, outcome: RunOutcome, told: Told
) -> None:
    """Until `ends_at`; a case that fails does not stop the next."""
    for case in cases:
        name = f"{case.group}: {case.name}"
        if bench.stopwatch.now() > ends_at:
            outcome.left_out[name] = "no time left"
            continue
        try:
            row = _measured(bench, limits, case, outcome.left_out)
        except NotHere as reason:
            outcome.left_out[name] = str(reason)
        except torch.OutOfMemoryError:
            outcome.left_out[name] = "the device's memory is too small"
        except Exception as error:
            outcome.failed[name] = f"{type(error).__name__}: {error}"[:300]
            told(f"FAILED {name}: {outcome.failed[name]}")
        else:
            outcome.rows.append(row)
            told(f"{row.timing.median_s * 1e6:12.1f} us {row.share:7.1%} of the limit  {name}")
        _forget(bench)


def _measured(bench: Bench, limits: DeviceLimits, case: BenchCase, left_out: dict[str, str]) -> BenchRow:
    """A rival that cannot be run is left out. Raises ValueError when one that must agree does not."""
    work = case.build(bench)
    rivals: dict[str, KernelTiming] = {}
    with torch.inference_mode():
        timing = bench.stopwatch.time(work.run)
        for name, way in {**work.agreeing, **work.rivals}.items():
            try:
                if name in work.agreeing:
                    _agree(work, name)
                rivals[name] = bench.stopwatch.time(way, waits=name in work.waits)
            except (RuntimeError, TypeError, AttributeError) as error:
                left_out[f"{case.group}: {case.name}, {name}"] = f"{type(error).__name__}: {error}"[:200]
    share = share_of(work, timing.median_s, limits)
    return BenchRow(case.group, case.name, timing, work.num_bytes, work.flops, share, rivals)


def _agree(work: Work, name: str) -> None:
    expected = work.agreeing[name]().float()
    got = work.run()
    assert isinstance(got, torch.Tensor), "a kernel that has something to agree with yields one tensor"
    error = float((got.float() - expected).norm() / expected.norm())
    if not error <= work.tolerance:
        raise ValueError(f"{error:.1e} away from {name}, more than {work.tolerance:.0e}")


def _forget(bench: Bench) -> None:
    """Cases are as large as the device's memory."""
    if bench.is_cuda:
        gc.collect()
        torch.cuda.empty_cache()
