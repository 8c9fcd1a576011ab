"""Plants mutants in rooms of the product and runs the tests that execute the changed lines; prints who survived.

    python -m tests.mutants ROOM ... [--number 20] [--seed 1] [--processes 2] [--report FILE] [--every-test]

`--number` is of each room. Each mutant lives in a copy of the checkout. Its tests are those that execute its statement,
as coverage.py has seen them in one run of all tests that work in one process. That map is kept in `.mutants/` for as
long as neither the product nor a test changes; `--last-map` takes the last one all the same. `--every-test` gives
survivors to the tests of whole processes too.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
TEST_TIMEOUT_S = 90
"""A test that takes longer hangs, which is a way to find a mutant."""
MUTANT_TIMEOUT_S = 600.0
"""A mutant is given up, undecided, when its tests take longer together."""
UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of a mutant: "killed", "survived", "not executed" or "undecided"; and the test that found it."""

    mutant: Mutant
    fate: str
    found_by: str = ""

    @property
    def row(self) -> str:
        mutant = self.mutant
        fields = {"path": mutant.path, "start": mutant.start, "new": mutant.new, "name": mutant.name}
        return json.dumps({**fields, "fate": self.fate, "found_by": self.found_by})


def pick_mutants(rooms: Iterable[str], number: int, seed: int) -> list[Mutant]:
    """Return `number` mutants of each room, no two in one statement, the same ones for the same seed and code."""
    picked: list[Mutant] = []
    for room in rooms:
        every = list(iter_mutants(ROOT, room))
        random.Random(f"{room} {seed}").shuffle(every)
        one_each: dict[tuple[str, tuple[int, int]], Mutant] = {}
        for mutant in every:
            one_each.setdefault((mutant.path, mutant.lines), mutant)
        picked += sorted(list(one_each.values())[:number])
    return picked


def copy_of_the_checkout(place: Path) -> Path:
    """Copy what git tracks, and what it does not ignore, as it is now."""
    shutil.rmtree(place, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def run_tests(place: Path, tests: Sequence[str]) -> str:
    """Return the first test that failed, UNDECIDED, or "" when all of `tests` let the mutant pass."""
    if not tests:
        return ""
    selected = place / ".mutant-tests"
    selected.write_text("\n".join(tests))
    flags = ["-x", "-q", "--no-header", f"--timeout={TEST_TIMEOUT_S}", "-p", "no:cacheprovider", "-m", "not nightly"]
    command = [sys.executable, "-m", "pytest", *flags, f"@{selected}"]
    try:
        done = subprocess.run(
            command,
            cwd=place,
            env=environment(place),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=MUTANT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return UNDECIDED
    if not done.returncode:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return found[1] if found else "a test that ended its process"


def write_anew(file: Path, text: str) -> None:
    """Write a module so that its cached bytecode, which may be of the same second and size, is not taken for it."""
    file.write_text(text)
    for cached in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        cached.unlink()


def try_out(mutant: Mutant, place: Path, tests: TestMap, every_test: bool) -> Trial:
    """Plant a mutant in the copy at `place`, run its tests, and take it out again."""
    file = place / mutant.path
    right = file.read_text()
    write_anew(file, mutant.apply(right))
    try:
        near, far = tests.of(mutant)
        found_by = run_tests(place, near) or run_tests(place, far)
        if not found_by and every_test:
            found_by = run_tests(place, PROCESS_TESTS)
    finally:
        write_anew(file, right)
    if found_by == UNDECIDED:
        return Trial(mutant, UNDECIDED)
    return Trial(mutant, "killed" if found_by else "survived" if near or far else "not executed", found_by)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"default: {' '.join(ROOMS)}")
    parser.add_argument("--number", type=int, default=20, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn")
    parser.add_argument("--processes", type=int, default=2, help="mutants that are tested at once")
    parser.add_argument("--report", type=Path, help="write every mutant and its fate to this file, as JSON lines")
    parser.add_argument("--only", type=Path, help="test just the mutants of this report that were not killed")
    parser.add_argument("--last-map", action="store_true", help="choose tests as before they or the code changed")
    parser.add_argument("--every-test", action="store_true", help="give survivors to the tests of whole processes too")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    mutants = pick_mutants(arguments.rooms or ROOMS, arguments.number, arguments.seed)
    if arguments.only:
        rows = [json.loads(line) for line in arguments.only.read_text().splitlines()]
        alive = {row["name"] for row in rows if row["fate"] != "killed"}
        mutants = [mutant for mutant in mutants if mutant.name in alive]
    work = ROOT / ".mutants"
    work.mkdir(exist_ok=True)
    tests = TestMap.last(work) if arguments.last_map else TestMap.of_checkout(ROOT, work, copy_of_the_checkout)
    places: SimpleQueue[Path] = SimpleQueue()
    for number in range(arguments.processes):
        places.put(copy_of_the_checkout(work / f"copy-{number}"))
    report = arguments.report.open("w") if arguments.report else None

    def in_a_copy(mutant: Mutant) -> Trial:
        place = places.get()
        began = time.monotonic()
        try:
            trial = try_out(mutant, place, tests, arguments.every_test)
        finally:
            places.put(place)
        took_s = time.monotonic() - began
        print(f"{trial.fate:12} {took_s:5.0f} s  {mutant.name}  {trial.found_by}", flush=True)  # noqa: T201
        if report:
            print(trial.row, file=report, flush=True)
        return trial

    with ThreadPoolExecutor(arguments.processes) as pool:
        fates = Counter(trial.fate for trial in pool.map(in_a_copy, mutants))
    print(f"{len(mutants)} mutants: " + ", ".join(f"{n} {fate}" for fate, n in sorted(fates.items())))  # noqa: T201


if __name__ == "__main__":
    main()
