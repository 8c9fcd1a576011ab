"""Maps each line of the product to the tests that execute it, by one run of the tests under coverage.py."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from coverage.numbits import numbits_to_nums

from tests.mutants.mutate import Mutant

_COVERAGE = """
[run]
source = services/tandem
omit = services/tandem/wire/gen/*
relative_files = true
"""
_SLOW_LAST = ("property", "contract", "simulation", "kernels", "golden")
_NOT_IN_ONE_PROCESS = ("e2e", "chaos", "hosts", "mutants")


def environment(place: Path) -> dict[str, str]:
    """Return this process' environment with the product of the checkout at `place` instead of the installed one."""
    paths = os.pathsep.join(str(place / name) for name in ("services", "kernels", "."))
    return {**os.environ, "PYTHONPATH": paths, "TANDEM_NO_SHRINKING": "1"}


def digest_of(root: Path, folders: Iterable[str]) -> str:
    """Return a digest of all Python files in some folders, but for those of this one."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            if path.parent.name == "mutants":
                continue
            total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class TestMap:
    """`_lines[path][line]` are the numbers of the tests, in `_names`, that execute a line."""

    _lines: dict[str, dict[int, list[int]]]
    _names: list[str]

    __test__ = False

    @classmethod
    def of_checkout(cls, root: Path, work: Path, copy_to: Callable[[Path], Path]) -> TestMap:
        """Read the map of this state of `root` from `work`, or make it in a copy."""
        digest = digest_of(root, ("services", "tests"))
        data, failed = work / f"coverage-{digest}", work / f"failed-{digest}.json"
        if not data.exists():
            place = copy_to(work / "map")
            _run_under_coverage(place)
            last_failed = place / ".pytest_cache/v/cache/lastfailed"
            failed.write_text(last_failed.read_text() if last_failed.exists() else "{}")
            (place / ".coverage").replace(data)
        return cls.read(data, set(json.loads(failed.read_text())))

    @classmethod
    def last(cls, work: Path) -> TestMap:
        """Read the map in `work` that was made last. Raises ValueError where there is none."""
        data = max(work.glob("coverage-*"), key=lambda path: path.stat().st_mtime)
        failed = data.with_name(data.name.replace("coverage-", "failed-") + ".json")
        return cls.read(data, set(json.loads(failed.read_text())))

    @classmethod
    def read(cls, data: Path, failed: set[str]) -> TestMap:
        """Read a file of coverage.py, but for tests that `failed` without any mutant."""
        names: dict[str, int] = {}
        lines: dict[str, dict[int, list[int]]] = {}
        # The schema is documented. The class that reads it asks once for each file and test, which takes minutes.
        with closing(sqlite3.connect(data)) as connection:
            contexts: dict[int, str] = dict(connection.execute("select id, context from context").fetchall())
            files: dict[int, str] = dict(connection.execute("select id, path from file").fetchall())
            for file, context, numbits in connection.execute("select file_id, context_id, numbits from line_bits"):
                test = contexts[context].rpartition("|")[0]
                if not test or test in failed:
                    continue
                number = names.setdefault(test, len(names))
                of_file = lines.setdefault(files[file], defaultdict(list))
                for line in numbits_to_nums(numbits):
                    of_file[line].append(number)
        return cls(lines, list(names))

    def of(self, mutant: Mutant) -> tuple[list[str], list[str]]:
        """Return the tests that execute a mutant's statement: those of its room's folder, and all others, quick rooms
        first."""
        of_file = self._lines.get(mutant.path, {})
        first, last = mutant.lines
        numbers = {number for line in range(first, last + 1) for number in of_file.get(line, ())}
        names = sorted(self._names[number] for number in numbers)
        home = f"tests/unit/{Path(mutant.path).parts[2]}/"
        near = [name for name in names if name.startswith(home)]
        far = [name for name in names if not name.startswith(home)]
        return near, sorted(
            far, key=lambda name: _SLOW_LAST.index(room) if (room := _room_of(name)) in _SLOW_LAST else -1
        )


def _room_of(test: str) -> str:
    return test.split("/")[1]


def _run_under_coverage(place: Path) -> None:
    """Run all tests of one process in the copy at `place`, which leaves `.coverage` there. Failures do not matter."""
    (place / ".coveragerc").write_text(_COVERAGE)
    folders = [
        str(path.relative_to(place))
        for path in sorted((place / "tests").iterdir())
        if path.is_dir() and path.name not in _NOT_IN_ONE_PROCESS and any(path.rglob("test_*.py"))
    ]
    flags = ["-q", "-n", "2", "--dist", "loadfile", "--timeout=1200", "-m", "not nightly"]
    cover = ["--cov", "--cov-context=test", "--cov-report=", "--cov-config=.coveragerc"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *cover, *folders], cwd=place, env=environment(place), check=False
    )
