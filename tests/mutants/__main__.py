"""Plants mutants in rooms of the product and runs the tests that execute the changed lines; prints who survived.

    python -m tests.mutants ROOM ... [--number 20] [--seed 1] [--processes 2] [--report FILE] [--every-test]

`--number` is of each room. Each mutant lives in a copy of the checkout. Its tests are those that execute its statement,
as coverage.py has seen them in one run of all tests that work in one process; that map is kept in `.mutants/` for as
long as neither the product nor a test changes. `--every-test` gives survivors to the tests of whole processes too.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.mutate import Mutant, iter_mutants
from tests.mutants.tests_of import TestMap, environment

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    *("kv", "sched", "engine", "flow", "admission", "routing", "scaling", "transfer", "stores", "gateway", "worker"),
    "runtime",
)
PROCESS_TESTS = ("tests/e2e",)
"""Tests of whole processes, whose lines the map does not have."""
MUTANT_TIMEOUT_S = 900.0
"""A mutant whose tests take longer hangs, which is a way to be found."""


def draw(rooms: Iterable[str], number: int, seed: int) -> list[Mutant]:
    """Return `number` mutants of each room, no two in one statement, the same ones for the same seed and code."""
    drawn: list[Mutant] = []
    for room in rooms:
        every = list(iter_mutants(ROOT, room))
        random.Random(f"{room} {seed}").shuffle(every)
        one_each = {(mutant.path, mutant.lines): mutant for mutant in reversed(every)}
        order = [mutant for mutant in every if one_each[mutant.path, mutant.lines] is mutant]
        drawn += sorted(order[:number])
    return drawn


def copy_of_the_checkout(place: Path) -> Path:
    """Copy what git tracks, and what it does not ignore, as it is now."""
    shutil.rmtree(place, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def run_tests(place: Path, tests: Sequence[str]) -> str:
    """Return "killed", "hung" or "" for a mutant that all of `tests` let pass."""
    if not tests:
        return ""
    selected = place / ".mutant-tests"
    selected.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--timeout=120", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, f"@{selected}"],
            cwd=place,
            env=environment(place),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=MUTANT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hung"
    return "killed" if done.returncode else ""


def fate_of(mutant: Mutant, place: Path, tests: TestMap, every_test: bool) -> str:
    """Return what becomes of a mutant: "killed", "hung", "survived" or "not executed"."""
    file = place / mutant.path
    right = file.read_text()
    file.write_text(mutant.apply(right))
    try:
        near, far = tests.of(mutant)
        fate = run_tests(place, near) or run_tests(place, far)
        if not fate and every_test:
            fate = run_tests(place, PROCESS_TESTS)
        return fate or ("survived" if near or far else "not executed")
    finally:
        file.write_text(right)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"default: {' '.join(ROOMS)}")
    parser.add_argument("--number", type=int, default=20, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn")
    parser.add_argument("--processes", type=int, default=2, help="mutants that are tested at once")
    parser.add_argument("--report", type=Path, help="write every mutant and its fate to this file, as JSON lines")
    parser.add_argument("--only", type=Path, help="test just the mutants of this report that were not killed")
    parser.add_argument("--every-test", action="store_true", help="give survivors to the tests of whole processes too")
    arguments = parser.parse_args()
    mutants = draw(arguments.rooms or ROOMS, arguments.number, arguments.seed)
    if arguments.only:
        rows = [json.loads(line) for line in arguments.only.read_text().splitlines()]
        open_ones = {(row["path"], row["start"], row["new"]) for row in rows if row["fate"] not in ("killed", "hung")}
        mutants = [mutant for mutant in mutants if (mutant.path, mutant.start, mutant.new) in open_ones]
    work = ROOT / ".mutants"
    work.mkdir(exist_ok=True)
    tests = TestMap.of_checkout(ROOT, work, copy_of_the_checkout(work / "map"))
    places: SimpleQueue[Path] = SimpleQueue()
    for number in range(arguments.processes):
        places.put(copy_of_the_checkout(work / f"copy-{number}"))

    def try_out(mutant: Mutant) -> tuple[Mutant, str]:
        place = places.get()
        began = time.monotonic()
        try:
            fate = fate_of(mutant, place, tests, arguments.every_test)
        finally:
            places.put(place)
        print(f"{fate:12} {time.monotonic() - began:5.0f} s  {mutant.name}", flush=True)  # noqa: T201
        return mutant, fate

    with ThreadPoolExecutor(arguments.processes) as pool:
        results = list(pool.map(try_out, mutants))
    if arguments.report:
        rows = [{"path": m.path, "start": m.start, "new": m.new, "name": m.name, "fate": fate} for m, fate in results]
        arguments.report.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = Counter(fate for _, fate in results)
    print(f"{len(results)} mutants: " + ", ".join(f"{n} {fate}" for fate, n in sorted(counts.items())))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
