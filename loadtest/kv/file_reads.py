"""Compare how blocks are read from files and written to them: plain calls with and without the page cache, and NIXL.

    python -m loadtest.kv.file_reads [--blocks 256] [--rounds 5] [--directory DIR]

Each round writes and reads the same files once with each, in this order. "cold": the page cache has nothing of them.
Times of writes end with `fdatasync` only in the row that names it. Digests are left out.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from loadtest.common.tables import table
from tandem.core.clock import SystemClock
from tandem.kv.layout import KVGroup, KVLayout
from tandem.transfer.nixl_agent import open_agent
from tandem.worker.kv.block_files import HEADER_BYTES
from tandem.worker.kv.file_cache import NUM_READERS

LAYOUT = KVLayout(16, (KVGroup(30, 3, 64, "float32"),))
"""That of SmolLM2: blocks of 720 KiB."""
FILE_BYTES = HEADER_BYTES + LAYOUT.block_bytes


class _Files:
    """Files of one block each in `directory`, and page-aligned memory for all of them."""

    def __init__(self, directory: Path, number: int) -> None:
        self._nixl = open_agent("files", ("POSIX",)).api
        self.paths = [directory / str(i) for i in range(number)]
        self._memory = mmap.mmap(-1, number * FILE_BYTES)
        view = memoryview(self._memory)
        self.views = [view[i * FILE_BYTES : (i + 1) * FILE_BYTES] for i in range(number)]
        np.frombuffer(self._memory, np.uint8)[:] = np.random.default_rng(1).integers(
            0, 256, number * FILE_BYTES, np.uint8
        )

    def write(self, flags: int = 0, *, syncs: bool = False) -> None:
        for path, view in zip(self.paths, self.views, strict=True):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
            assert os.pwrite(file, view, 0) == FILE_BYTES
            if syncs:
                os.fdatasync(file)
            os.close(file)

    def read(self, flags: int = 0, num_threads: int = 1) -> None:
        def read_one(number: int) -> None:
            file = os.open(self.paths[number], os.O_RDONLY | flags)
            assert os.preadv(file, [self.views[number]], 0) == FILE_BYTES
            os.close(file)

        if num_threads == 1:
            for number in range(len(self.paths)):
                read_one(number)
            return
        with ThreadPoolExecutor(num_threads) as readers:
            list(readers.map(read_one, range(len(self.paths))))

    def read_by_nixl(self) -> None:
        api = self._nixl
        files = [os.open(path, os.O_RDONLY) for path in self.paths]
        base = np.frombuffer(self._memory, np.uint8).ctypes.data
        memory = api.register_memory([(base, len(self._memory), 0, "")], "DRAM", backends=["POSIX"])
        rows = [(0, FILE_BYTES, file, "") for file in files]
        storage = api.register_memory(rows, "FILE", backends=["POSIX"])
        local = api.get_xfer_descs([(base + i * FILE_BYTES, FILE_BYTES, 0) for i in range(len(files))], "DRAM")
        handle = api.initialize_xfer("READ", local, storage.trim(), "files", b"", ["POSIX"])
        state = api.transfer(handle)
        while state == "PROC":
            state = api.check_xfer_state(handle)
        assert state == "DONE", state
        api.release_xfer_handle(handle)
        api.deregister_memory(storage)
        api.deregister_memory(memory)
        for file in files:
            os.close(file)

    def forget(self) -> None:
        """Drop the files from the page cache."""
        for path in self.paths:
            file = os.open(path, os.O_RDONLY)
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.kv.file_reads")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the files are (default: a temporary directory)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        files = _Files(Path(directory), args.blocks)
        cases: dict[str, tuple[bool, Callable[[], None]]] = {
            "write, plain": (False, files.write),
            "write, plain, fdatasync": (False, lambda: files.write(syncs=True)),
            "write, O_DIRECT": (False, lambda: files.write(os.O_DIRECT)),
            "read, plain, cold": (True, files.read),
            f"read, plain, cold, {NUM_READERS} threads": (True, lambda: files.read(num_threads=NUM_READERS)),
            f"read, O_DIRECT, {NUM_READERS} threads": (True, lambda: files.read(os.O_DIRECT, NUM_READERS)),
            "read, NIXL POSIX, cold": (True, files.read_by_nixl),
            "read, plain, warm": (False, files.read),
            f"read, plain, warm, {NUM_READERS} threads": (False, lambda: files.read(num_threads=NUM_READERS)),
            "read, NIXL POSIX, warm": (False, files.read_by_nixl),
        }
        rates = _measure(files, cases, args.rounds)
    rows = [[name, *(f"{figure:.2f}" for figure in _spread(values))] for name, values in rates.items()]
    sys.stdout.write(table(["", "GB/s", "least", "most"], rows) + "\n")
    return 0


def _measure(
    files: _Files, cases: dict[str, tuple[bool, Callable[[], None]]], num_rounds: int
) -> dict[str, list[float]]:
    """Return the GB/s of each case in each round."""
    clock = SystemClock()
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(num_rounds):
        for name, (is_cold, run) in cases.items():
            if is_cold:
                files.forget()
            began = clock.now()
            run()
            rates[name].append(len(files.paths) * FILE_BYTES / (clock.now() - began) / 1e9)
    return rates


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


if __name__ == "__main__":
    sys.exit(main())
