"""Measure steps of a whole model without a server: decode steps and prompt chunks beside their roofline time.

    python -m loadtest model --device cuda --shape llama-3.1-8b [--batches 1,32,256] [--contexts 1024,8192]

The executor is the serving one, its plans are made by hand. The machine's limits are measured in the same run, and the
share is relative to the floor that follows from them. On a GPU decode steps run twice, as replayed graphs and eagerly.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from loadtest.common.tables import table
from loadtest.engine.step_floor import Rates, floor_s
from loadtest.engine.step_plans import (
    Decode,
    ModelExecutor,
    PlannedChunk,
    StepCase,
    Unfit,
    fill,
    plans_of,
    tables_of,
    time_steps,
)
from tandem.core.clock import Clock, SystemClock
from tandem.core.config import Bytes, EngineConfig, ModelConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.model_catalog import RANDOM_PREFIX
from tandem.runtime.architectures.spec import DecoderSpec
from tandem.runtime.device import num_compute_threads, torch_dtype
from tandem.runtime.model_config import read_model_config
from tandem.runtime.model_store import cache_root, resolve_model
from tandem_kernels.bench.environment import clocks, describe
from tandem_kernels.bench.grid import QUICK
from tandem_kernels.bench.roofline import measure_limits
from tandem_kernels.bench.timing import CudaStopwatch, HostStopwatch, Stopwatch

GIB = 1 << 30
SIZES = {
    "cuda": {"batches": "1,32,256", "contexts": "1024,8192", "chunks": "512,2048,8192", "cached": "0,8192"},
    "cpu": {"batches": "1,8", "contexts": "256,1024", "chunks": "128,512", "cached": "0,512"},
}
_GRAPHS = "cuda_graphs"
"""The engine's setting, where it has one."""
KernelTimes = dict[str, tuple[float, float]]
"""Launches and seconds per step of each kernel, by its name."""
_CHUNK_STEPS = 6
_PROFILED = 4
"""Steps of a case that are profiled."""
_SHOWN = 12
"""Kernels of a step that a table names."""
_SETTLING = 3
"""Steps before those that count.

One more runs after them: with plans launched ahead, the last step's time differs, because nothing is launched during
it.
"""


@dataclass(frozen=True, slots=True)
class StepRow:
    """Times of one case's steps in seconds: median, first and ninth decile, and the least possible time on this
    machine."""

    case: str
    mode: str
    median_s: float
    low_s: float
    high_s: float
    floor_s: float
    num_tokens: int
    steps: int

    @property
    def share(self) -> float:
        return self.floor_s / self.median_s


@dataclass(frozen=True, slots=True)
class ModelStepsReport:
    """All rows of a run.

    `rates` are the machine's bytes and operations per second, `kernels` the kernels' times of each profiled case."""

    machine: dict[str, str]
    rates: Rates
    rows: list[StepRow]
    left_out: dict[str, str]
    kernels: dict[str, KernelTimes]

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(row) | {"share": row.share, "tokens_s": row.num_tokens / row.median_s} for row in self.rows]
        return {
            "machine": self.machine,
            "rates": asdict(self.rates),
            "rows": rows,
            "left_out": self.left_out,
            "kernels": self.kernels,
        }

    def to_markdown(self) -> str:
        heads = ("step", "way", "floor ms", "median ms", "p10 to p90", "of the floor", "steps/s", "tokens/s")
        rows = [
            (
                row.case,
                row.mode,
                f"{row.floor_s * 1e3:.3f}",
                f"{row.median_s * 1e3:.3f}",
                f"{row.low_s * 1e3:.3f} to {row.high_s * 1e3:.3f}",
                f"{row.share:.0%}",
                f"{1 / row.median_s:,.1f}",
                f"{row.num_tokens / row.median_s:,.0f}",
            )
            for row in self.rows
        ]
        facts = self.machine | {
            "limits": f"copy {self.rates.memory / 1e9:,.0f} GB/s, matrix {self.rates.matrix / 1e12:,.3f} TFLOP/s"
        }
        lines = [*(f"- {name}: {value}" for name, value in facts.items()), "", table(heads, rows)]
        lines += [f"- left out: {name}: {why}" for name, why in self.left_out.items()]
        lines += [_kernel_table(name, kernels) for name, kernels in self.kernels.items()]
        return "\n".join([*lines, ""])


def _kernel_table(name: str, kernels: KernelTimes) -> str:
    """Format the longest kernels of a step of a case; the last row sums up the others."""
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])
    rows = [(kernel[:80], f"{count:g}", f"{seconds * 1e3:.3f}") for kernel, (count, seconds) in longest[:_SHOWN]]
    others = [times for _, times in longest[_SHOWN:]]
    rows.append(("others", f"{sum(t[0] for t in others):g}", f"{sum(t[1] for t in others) * 1e3:.3f}"))
    total = sum(seconds for _, seconds in kernels.values())
    return "\n".join(["", table((f"{name}: {total * 1e3:.3f} ms of kernels", "launches", "ms"), rows)])


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(argv)
    try:
        report = run(args, " ".join(["python -m loadtest model", *argv]), SystemClock())
    except TandemError as error:
        sys.stderr.write(f"loadtest model: {error.message}\n")
        return 2
    if args.json:
        args.json.write_text(json.dumps(report.to_json(), indent=1), encoding="utf-8")
    sys.stdout.write(report.to_markdown())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest model", description="Measure a model's steps without a server.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", default="", help="of a published model, with random weights")
    what.add_argument("--model", default="smollm2-135m-instruct", help="any model (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="by device, if not given")
    parser.add_argument("--block-size", type=int, default=0, help="tokens; 0: 16 on a CPU, 64 on a GPU")
    parser.add_argument("--batches", type=_sizes, help="sequences that decode")
    parser.add_argument("--contexts", type=_sizes, help="tokens that each attends to")
    parser.add_argument("--chunks", type=_sizes, help="tokens of a prompt in one step")
    parser.add_argument("--cached", type=_sizes, help="tokens before such a chunk")
    parser.add_argument("--steps", type=int, default=32, help="decode steps that are measured (default: %(default)s)")
    parser.add_argument("--kv-gib", type=float, default=0.0, help="KV pool; 0: 2 on a CPU, all there is on a GPU")
    parser.add_argument("--graphs", choices=("both", "on", "off"), default="both", help="on a GPU")
    parser.add_argument("--batch-invariant", action="store_true", help="with the kernels of model.batch_invariant")
    parser.add_argument("--profile", action="store_true", help="add the time of each kernel of a step, on a GPU")
    parser.add_argument("--threads", type=int, default=0, help="on a CPU; 0: all cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(",") if part)
    if any(size < 0 for size in sizes):
        raise argparse.ArgumentTypeError("sizes are not negative")
    return sizes


def cases_of(args: argparse.Namespace) -> list[StepCase]:
    """Return the cases to measure, decodes first; options that are missing take defaults of the device."""
    sizes = {name: _sizes(text) for name, text in SIZES[args.device].items()}
    sizes |= {name: vars(args)[name] for name in sizes if vars(args)[name] is not None}
    decodes = [Decode(batch, context) for context in sizes["contexts"] for batch in sizes["batches"]]
    return [*decodes, *(PlannedChunk(rows, cached) for cached in sizes["cached"] for rows in sizes["chunks"])]


def run(args: argparse.Namespace, command: str, clock: Clock) -> ModelStepsReport:
    """Measure all cases, on one executor after the other, and return the report. Raises TandemError."""
    device, cases = torch.device(args.device), cases_of(args)
    model, engine = _settings(args, cases)
    directory = resolve_model(model.id, cache_root(model.cache_dir))
    config = read_model_config(directory)
    torch.set_num_threads(num_compute_threads(args.threads))
    rates = measure_rates(device, torch_dtype(model.dtype))
    _give_back(device)
    machine = describe(device, command) | {"model": f"{model.id}, {model.dtype}"}
    rows: list[StepRow] = []
    left_out: dict[str, str] = {}
    kernels: dict[str, KernelTimes] | None = {} if args.profile and device.type == "cuda" else None
    for mode, settings in _modes(args, engine):
        executor = _load(directory, config, model, settings)
        machine[f"executor, {mode}"] = repr(executor)
        measured = cases if mode != "eager" else [case for case in cases if isinstance(case, Decode)]
        rows += Measurement(executor, config, mode, rates, args.steps, clock, kernels).rows(measured, left_out)
        del executor
        _give_back(device)
    if device.type == "cuda":
        machine["clocks after (SM, memory, degrees C, power)"] = clocks()
    return ModelStepsReport(machine, rates, rows, left_out, kernels or {})


def _give_back(device: torch.device) -> None:
    """Free the GPU memory that torch caches, which the next executor's pool needs."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure the machine's rates: bytes of a copy, and operations of the best of a few matrix products."""
    if device.type == "cuda":
        stopwatch: Stopwatch = CudaStopwatch(device, 0.3)
        limits = measure_limits(device, dtype, stopwatch, QUICK)
    else:
        grid = replace(QUICK, copy_bytes=1 << 28, matrices=((512, 576, 1536), (512, 2048, 2048)))
        limits = measure_limits(device, dtype, HostStopwatch(0.2), grid)
    return Rates(limits.copy_bytes_s, limits.matrix_flops_s)


def _settings(args: argparse.Namespace, cases: Sequence[StepCase]) -> tuple[ModelConfig, EngineConfig]:
    is_cuda = args.device == "cuda"
    dtype: Any = args.dtype or ("bfloat16" if is_cuda else "float32")
    name = RANDOM_PREFIX + args.shape if args.shape else args.model
    # Weights in fewer bits than their dtype's would be below the floor.
    model = ModelConfig(id=name, device=args.device, dtype=dtype, compact=False, batch_invariant=args.batch_invariant)
    most_rows = max((case.num_tokens for case in cases), default=1)
    engine = EngineConfig(
        max_num_seqs=max((case.batch for case in cases if isinstance(case, Decode)), default=1),
        max_num_batched_tokens=most_rows,
        block_size=args.block_size or (64 if is_cuda else 16),
        kv_cache_memory=Bytes(int((args.kv_gib or (0 if is_cuda else 2)) * GIB)),
        num_threads=args.threads,
    )
    return model, engine


def _modes(args: argparse.Namespace, engine: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    """Yield the engine settings with graphs and without, where the engine has that choice."""
    if args.device != "cuda" or _GRAPHS not in {field.name for field in fields(engine)}:
        yield "as served", engine
        return
    for mode, allowed, is_on in (("graphs", "on", True), ("eager", "off", False)):
        if args.graphs in ("both", allowed):
            graphs: dict[str, Any] = {_GRAPHS: is_on}
            yield mode, replace(engine, **graphs)


def _load(directory: Path, config: DecoderSpec, model: ModelConfig, engine: EngineConfig) -> ModelExecutor:
    """Load a model with random KV in its pool. Raises TandemError, also where the model is on another device than
    requested."""
    from tandem.runtime.model_loader import load_executor  # brings what only serving needs

    executor = load_executor(directory, config, model, engine)
    pool = executor.cache.pool
    if pool.device.type != model.device:
        raise TandemError(ErrorKind.UNSUPPORTED, f"the executor's KV is on {pool.device}", param="device")
    fill(pool)
    if pool.is_cuda:
        torch.cuda.synchronize()  # steps run on another stream
    return executor


@dataclass(frozen=True, slots=True)
class Measurement:
    """State that all cases of one executor share.

    `steps` is the number of measured decode steps. `kernels` receives the times of the kernels of each case; with None
    nothing is profiled.
    """

    executor: ModelExecutor
    config: DecoderSpec
    mode: str
    rates: Rates
    steps: int
    clock: Clock
    kernels: dict[str, KernelTimes] | None = None

    def rows(self, cases: Sequence[StepCase], left_out: dict[str, str]) -> Iterator[StepRow]:
        """Measure the cases that fit, and yield a row for each; `left_out` receives the reasons for the others."""
        number = 1
        for case in cases:
            count = _SETTLING + (self.steps if isinstance(case, Decode) else _CHUNK_STEPS) + 1
            try:
                yield self._row(case, number, count)
                number += count
                if self.kernels is not None:
                    self.kernels[f"{case} ({self.mode})"] = self._profile(case, number)
            except Unfit as reason:
                left_out[f"{case} ({self.mode})"] = str(reason)
            number += count

    def _row(self, case: StepCase, number: int, count: int) -> StepRow:
        """Measure one case. Raises Unfit."""
        executor, longest = self.executor, max(case.lengths(count))
        if longest > executor.max_model_len:
            raise Unfit(f"{longest} tokens, the executor takes {executor.max_model_len}")
        tables = tables_of(case, count, executor.layout, executor.num_blocks)
        plans = plans_of(case, number, count, tables, executor.vocab_size)
        seconds = sorted(time_steps(executor, plans, self.clock)[_SETTLING:-1])
        low, high = (seconds[round(share * (len(seconds) - 1))] for share in (0.1, 0.9))
        item_bytes, token_bytes = executor.model.dtype.itemsize, executor.layout.token_bytes
        floor = floor_s(self.config, item_bytes, token_bytes, self.rates, case.work)
        row = StepRow(str(case), self.mode, statistics.median(seconds), low, high, floor, case.num_tokens, len(seconds))
        sys.stderr.write(f"{row.median_s * 1e3:10.3f} ms {row.share:6.1%} of the floor  {case} ({self.mode})\n")
        return row

    def _profile(self, case: StepCase, number: int) -> KernelTimes:
        """Profile a few steps of a case and return the launches and seconds of each kernel per step."""
        executor = self.executor
        tables = tables_of(case, _PROFILED, executor.layout, executor.num_blocks)
        plans = plans_of(case, number, _PROFILED, tables, executor.vocab_size)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            time_steps(executor, plans, self.clock)
            torch.cuda.synchronize()
        return {
            event.key: (event.count / _PROFILED, event.self_device_time_total / 1e6 / _PROFILED)
            for event in profiler.key_averages()
            if event.self_device_time_total
        }


if __name__ == "__main__":
    sys.exit(main())
