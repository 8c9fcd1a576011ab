"""Find the fastest tile sizes of the attention kernels on this GPU; the kernels' tables are not changed.

    python -m tandem_kernels.bench.autotune [--kernels decode,chunk] [--head-dim 128] [--jobs 12] [--budget-s 480]

With --jobs, processes compile all tile sizes into Triton's cache first. Tile sizes are installed in the kernel's table
in turn and run the same cases; tile sizes that are slow in one case do not run the later ones. A result that differs
from that of the table's own tile sizes is an error, and the exit code is 1. Without a GPU, `TRITON_INTERPRET=1 python
-m tandem_kernels.bench.autotune --device cpu --tiny` is a smoke test.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tandem_kernels.bench.attention import HALF_TOLERANCE, attention_cases
from tandem_kernels.bench.case import Bench, BenchCase
from tandem_kernels.bench.environment import clocks, describe
from tandem_kernels.bench.grid import FULL, KIB, LLAMA_1B, LLAMA_8B, TINY, Grid
from tandem_kernels.bench.timing import CudaStopwatch, HostStopwatch
from tandem_kernels.dispatch import triton_kernels
from tandem_kernels.triton import decode_attention, prefill_attention

Tiles = decode_attention.DecodeTiles | prefill_attention.PrefillTiles

SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "decode": {
        "block_n": (32, 64, 128),
        "slice_tokens": (256, 512),
        "warps": (2, 4, 8),
        "stages": (3, 5, 7, 9),
    },
    "chunk": {"block_m": (64, 128), "block_n": (32, 64, 128), "warps": (4, 8), "stages": (3, 5, 7)},
}
"""Values to try for each field of a kernel's tile sizes."""

_TABLES: dict[str, dict[tuple[int, int], Any]] = {"decode": decode_attention.TILES, "chunk": prefill_attention.TILES}
_SHAPES = {shape.head_dim: shape for shape in (LLAMA_8B, LLAMA_1B)}
_HALF_BYTES = 2
_FIRST_SHARE = 0.7
"""Fraction of a search's time for its first case, in which all tile sizes are compiled."""
_SLOW_FACTOR = 1.15
"""Factor on the fastest time of a case; slower tile sizes do not run the later cases."""
_SHOWN = 6
_COMPILE_BYTES = 1 << 30
"""Largest KV pool of a process that compiles."""


@dataclass(slots=True)
class Entry:
    """One choice of tile sizes in a search, with its results.

    `seconds`: time of each case that ran. `left`: why later cases did not run; empty if all ran. `is_wrong`: the result
    differs from that of the tile sizes in the kernel's table.
    """

    tiles: Tiles
    seconds: dict[str, float] = field(default_factory=dict)
    left: str = ""
    is_wrong: bool = False


@dataclass(frozen=True, slots=True)
class TileSearch:
    """Search for the fastest tile sizes of `kernel` under one key of its table of tile sizes.

    `key`: (padded head size, bytes of an element). `cases`: what is timed. `entries`: the tile sizes to try, of which
    the first are those in the table.
    """

    kernel: str
    key: tuple[int, int]
    cases: Sequence[BenchCase]
    entries: Sequence[Entry]

    @property
    def own(self) -> Entry:
        return self.entries[0]

    @property
    def is_right(self) -> bool:
        return not self.own.left and not any(entry.is_wrong for entry in self.entries)

    @contextmanager
    def installed(self, tiles: Tiles) -> Iterator[None]:
        """Use tile sizes in place of those in the kernel's table until the context exits, which restores the table."""
        table = _TABLES[self.kernel]
        before = table[self.key]
        table[self.key] = tiles
        try:
            yield
        finally:
            table[self.key] = before

    def times_of(self, entry: Entry) -> float:
        """Return the time of `entry` relative to the table's own tile sizes, as geometric mean over all cases.

        It is infinite if the entry did not run all cases."""
        if entry.left or self.own.left:
            return math.inf
        shares = [seconds / self.own.seconds[name] for name, seconds in entry.seconds.items()]
        return math.exp(math.fsum(map(math.log, shares)) / len(shares))


def build_search(kernel: str, grid: Grid, sizes: Mapping[str, tuple[int, ...]]) -> TileSearch:
    """Return the search for the fastest tile sizes of `kernel` ("decode" or "chunk") in half precision; nothing is
    timed yet.

    `sizes`: for each field of the kernel's tile sizes, the values to try; every combination of them becomes an entry.
    `grid`: the model shapes, batch sizes and context lengths of the cases to time. The tile sizes are searched for the
    head size of its first shape."""
    key = max(64, 1 << (grid.shapes[0].head_dim - 1).bit_length()), _HALF_BYTES
    own = _TABLES[kernel][key]
    others = (type(own)(**dict(zip(sizes, numbers, strict=True))) for numbers in itertools.product(*sizes.values()))
    cases = [case for case in attention_cases(grid) if case.group == kernel]
    return TileSearch(kernel, key, cases, [Entry(own), *(Entry(tiles) for tiles in others if tiles != own)])


def run_search(search: TileSearch, bench: Bench, ends_at: float, log: Callable[[str], None]) -> None:
    """Time the entries of a search case by case, and store the times in the entries.

    An entry that is wrong, fails, or is more than 15 % slower than the fastest in a case does not run the later cases,
    for a reason that is stored in the entry. No case starts after `ends_at` (seconds of the stopwatch of `bench`). The
    kernel's own tile sizes are not left out for being slow or late. The kernel's table is unchanged afterwards. `log`
    receives a line for each case.
    """
    for number, case in enumerate(search.cases):
        now = bench.stopwatch.now()
        _time_case(search, case, bench, ends_at if number else now + _FIRST_SHARE * (ends_at - now))
        running = [entry for entry in search.entries if not entry.left]
        best = min((entry.seconds[case.name] for entry in running), default=math.inf)
        for entry in running:
            if entry is not search.own and entry.seconds[case.name] > _SLOW_FACTOR * best:
                entry.left = "slower"
        log(f"{search.kernel} {case.name}: {best * 1e6:,.1f} us, the fastest of {len(running)}")


def compile_entries(jobs: Sequence[_CompileJob], num_processes: int) -> None:
    """Compile tile sizes in several processes, so that a search finds them in Triton's cache on disk."""
    with get_context("spawn").Pool(num_processes) as pool:
        for _ in pool.imap_unordered(_compile, jobs):
            pass


@dataclass(frozen=True, slots=True)
class _CompileJob:
    """Some entries, by index, of the search for a kernel's tile sizes at a head size."""

    kernel: str
    head_dim: int
    indices: range


def _compile(job: _CompileJob) -> None:
    """Run the first case once with each of a job's entries, over a pool of few layers, because processes share the
    device's memory."""
    bench = _bench(torch.device("cuda"), job.head_dim)
    bench = replace(bench, grid=replace(bench.grid, case_bytes=_COMPILE_BYTES))
    search = build_search(job.kernel, bench.grid, SIZES[job.kernel])
    work = search.cases[0].build(bench)
    for entry in (search.entries[i] for i in job.indices):
        with search.installed(entry.tiles), torch.inference_mode(), suppress(Exception):
            work.run()  # the search reports what fails


def _time_case(search: TileSearch, case: BenchCase, bench: Bench, ends_at: float) -> None:
    """Check and time one case with every remaining entry."""
    work = case.build(bench)
    expected: torch.Tensor | None = None
    for entry in search.entries:
        if not entry.left and entry is not search.own and bench.stopwatch.now() > ends_at:
            entry.left = "no time left"
        if entry.left:
            continue
        with search.installed(entry.tiles), torch.inference_mode():
            try:
                got = work.run()
                assert isinstance(got, torch.Tensor)
                expected = got.float() if expected is None else expected
                error = float((got.float() - expected).norm() / expected.norm())
                if not error <= HALF_TOLERANCE:
                    entry.left, entry.is_wrong = f"{error:.1e} away from the table's", True
                    continue
                entry.seconds[case.name] = bench.stopwatch.time(work.run).median_s
            except Exception as failure:  # tile sizes may need more resources than the device has
                entry.left = f"{type(failure).__name__}: {failure}".splitlines()[0][:120]


def to_markdown(search: TileSearch) -> str:
    """Format the fastest entries and the table's own as a Markdown table."""
    names = [case.name for case in search.cases]
    ranked = sorted(search.entries, key=search.times_of)
    shown = [entry for entry in ranked[:_SHOWN] if not entry.left]
    shown += [search.own] if search.own not in shown else []
    lines = [f"| {search.kernel}, heads of {search.key[0]} | of the table's time | {' | '.join(names)} |"]
    lines.append("|---" + "|---:" * (1 + len(names)) + "|")
    for entry in shown:
        times = (f"{entry.seconds[name] * 1e6:,.1f} us" if name in entry.seconds else "" for name in names)
        mark = " (the table's)" if entry is search.own else ""
        lines.append(f"| {_name(entry.tiles)}{mark} | {search.times_of(entry):.3f} | {' | '.join(times)} |")
    left: dict[str, int] = {}
    for entry in search.entries:
        if entry.left:
            left[entry.left] = left.get(entry.left, 0) + 1
    why = "; ".join(f"{count}: {reason}" for reason, count in left.items())
    ran = sum(not entry.left for entry in search.entries)
    return "\n".join([*lines, "", f"{ran} of {len(search.entries)} ran all works. {why}", ""])


def _name(tiles: Tiles) -> str:
    return ", ".join(f"{name} {number}" for name, number in tiles._asdict().items())


def _to_json(search: TileSearch) -> dict[str, Any]:
    entries = [
        {"tiles": entry.tiles._asdict(), "seconds": entry.seconds, "left": entry.left} for entry in search.entries
    ]
    return {"kernel": search.kernel, "key": search.key, "entries": entries}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tandem_kernels.bench.autotune", description="Find the fastest tiles.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", default="decode,chunk", metavar="NAME,...", help="(default: %(default)s)")
    parser.add_argument("--head-dim", type=int, choices=sorted(_SHAPES), default=128, help="(default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=480.0, help="for all of it (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="compile in N processes before (GPU only)")
    parser.add_argument("--tiny", action="store_true", help="toy sizes and two tiles, for a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args(argv)
    kernels = args.kernels.split(",")
    if unknown := [name for name in kernels if name not in SIZES]:
        parser.error(f"--kernels: there is no {', '.join(unknown)}, only {', '.join(SIZES)}")
    if args.device == "cpu" and not (args.tiny and os.environ.get("TRITON_INTERPRET") == "1"):
        parser.error("a CPU takes toy sizes, interpreted: TRITON_INTERPRET=1 and --tiny")
    bench = _open(torch.device(args.device), args)
    facts = describe(bench.device, " ".join(["python -m tandem_kernels.bench.autotune", *argv]))
    searches = [build_search(name, bench.grid, _sizes(name, args.tiny)) for name in kernels]
    ends_at = bench.stopwatch.now() + args.budget_s
    if args.jobs:
        compile_entries(
            [
                _CompileJob(search.kernel, args.head_dim, range(start, len(search.entries), args.jobs))
                for search in searches
                for start in range(args.jobs)
            ],
            args.jobs,
        )
        _log(f"compiled {args.budget_s - (ends_at - bench.stopwatch.now()):.0f} s after the start")
    for number, search in enumerate(searches):
        now = bench.stopwatch.now()
        run_search(search, bench, now + (ends_at - now) / (len(searches) - number), _log)
    if bench.is_cuda:
        facts = facts | {"clocks after (SM, memory, degrees C, power)": clocks()}
    if args.json:
        report = {"machine": facts, "contests": [_to_json(search) for search in searches]}
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    sys.stdout.write("\n".join([*lines, "", *(to_markdown(search) for search in searches)]))
    return 0 if all(search.is_right for search in searches) else 1


def _open(device: torch.device, args: argparse.Namespace) -> Bench:
    if args.tiny:
        return Bench(device, triton_kernels(), HostStopwatch(0.0), replace(TINY, cached=(0,)), 1 << 30)
    return _bench(device, args.head_dim)


def _bench(device: torch.device, head_dim: int) -> Bench:
    grid = replace(
        FULL, shapes=(_SHAPES[head_dim],), batches=(32, 256, 1), contexts=(8 * KIB, KIB),
        chunks=(2 * KIB, 8 * KIB), cached=(8 * KIB, 0),
    )  # fmt: skip
    memory = torch.cuda.get_device_properties(device).total_memory
    return Bench(device, triton_kernels(), CudaStopwatch(device, 0.1), grid, memory)


def _sizes(kernel: str, tiny: bool) -> dict[str, tuple[int, ...]]:
    """Return the values to try; for `tiny` a single variant of the table's own tile sizes."""
    if not tiny:
        return SIZES[kernel]
    own = _TABLES[kernel][64, _HALF_BYTES]._asdict()
    return {name: (number // 2 if name == next(iter(own)) else number,) for name, number in own.items()}


def _log(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
