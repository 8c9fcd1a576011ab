"""Run checks and cases one after the other until a deadline."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from tandem_kernels.bench.case import Bench, BenchCase, BenchRow, BenchWork, CaseUnavailable, share_of
from tandem_kernels.bench.checks import CheckResult, KernelCheck, run_check
from tandem_kernels.bench.roofline import DeviceLimits
from tandem_kernels.bench.timing import KernelTiming

Log = Callable[[str], None]


@dataclass(slots=True)
class RunOutcome:
    """Results of a bench run.

    `rows`: one for each case that was timed. `left_out`, `failed`: names of the other checks, cases and rivals, each
    with the reason.
    """

    checks: list[CheckResult] = field(default_factory=list)
    rows: list[BenchRow] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return not self.failed and all(result.is_right for result in self.checks)


def run_checks(bench: Bench, checks: Iterable[KernelCheck], ends_at: float, outcome: RunOutcome, log: Log) -> None:
    """Run checks until the stopwatch reads `ends_at`, and add their results to `outcome`; list the remaining ones as
    left out."""
    for check in checks:
        if bench.stopwatch.now() > ends_at:
            outcome.left_out[check.name] = "no time left"
            continue
        result = run_check(check, bench)
        outcome.checks.append(result)
        log(f"{'right' if result.is_right else 'WRONG'}  {check.name}: {result.failure or f'{result.error:.1e}'}")
        _forget(bench)


def run_cases(
    bench: Bench, limits: DeviceLimits, cases: Iterable[BenchCase], ends_at: float, outcome: RunOutcome, log: Log
) -> None:
    """Time cases until the stopwatch reads `ends_at`, and add a row for each to `outcome`; list the remaining ones as
    left out.

    A case that fails is listed as failed, and the run continues. `log` receives a line for each case that ran.
    """
    for case in cases:
        name = f"{case.group}: {case.name}"
        if bench.stopwatch.now() > ends_at:
            outcome.left_out[name] = "no time left"
            continue
        try:
            row = _measured(bench, limits, case, outcome.left_out)
        except CaseUnavailable as reason:
            outcome.left_out[name] = str(reason)
        except torch.OutOfMemoryError:
            outcome.left_out[name] = "the device's memory is too small"
        except Exception as error:
            outcome.failed[name] = f"{type(error).__name__}: {error}"[:300]
            log(f"FAILED {name}: {outcome.failed[name]}")
        else:
            outcome.rows.append(row)
            log(f"{row.timing.median_s * 1e6:12.1f} us {row.share:7.1%} of the limit  {name}")
        _forget(bench)


def _measured(bench: Bench, limits: DeviceLimits, case: BenchCase, left_out: dict[str, str]) -> BenchRow:
    """Time a case and its rivals; a rival that cannot run is left out.

    Raises ValueError when the result of a rival that must agree differs."""
    work = case.build(bench)
    rivals: dict[str, KernelTiming] = {}
    with torch.inference_mode():
        timing = bench.stopwatch.time(work.run)
        for name, call in {**work.agreeing, **work.rivals}.items():
            try:
                if name in work.agreeing:
                    _agree(work, name)
                rivals[name] = bench.stopwatch.time(call, waits=name in work.waits)
            except (RuntimeError, TypeError, AttributeError) as error:
                left_out[f"{case.group}: {case.name}, {name}"] = f"{type(error).__name__}: {error}"[:200]
    share = share_of(work, timing.median_s, limits)
    return BenchRow(case.group, case.name, timing, work.num_bytes, work.flops, share, rivals)


def _agree(work: BenchWork, name: str) -> None:
    """Raise ValueError unless the work's result agrees with that of the rival `name`."""
    expected = work.agreeing[name]().float()
    got = work.run()
    assert isinstance(got, torch.Tensor), "a kernel with an agreeing rival returns one tensor"
    error = float((got.float() - expected).norm() / expected.norm())
    if not error <= work.tolerance:
        raise ValueError(f"{error:.1e} away from {name}, more than {work.tolerance:.0e}")


def _forget(bench: Bench) -> None:
    """Free the device memory of the last case, because a case may need all of it."""
    if bench.is_cuda:
        gc.collect()
        torch.cuda.empty_cache()
