"""The contracts between the rooms, which `.ci/check` asks import-linter for, name every room and find violations."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PURE = {"core", "kv", "sched", "admission", "routing", "scaling", "engine", "orchestration"}


def lint_imports(directory: Path, places: list[Path]) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def contracts() -> dict[str, dict[str, list[str]]]:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {contract["id"]: contract for contract in configuration["tool"]["importlinter"]["contracts"]}


def test_planted_violations_are_found(tmp_path: Path) -> None:
    """One import upwards, one between neighbours, one of the outside world on a pure floor."""
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    planted = {"kv": "import tandem.sched\n", "runtime": "import tandem.transfer\n", "core": "import threading\n"}
    rooms = [p.name for p in (ROOT / "services" / "tandem").iterdir() if (p / "__init__.py").is_file()]
    for room in rooms:
        (tmp_path / "tandem" / room).mkdir(parents=True)
        (tmp_path / "tandem" / room / "__init__.py").write_text(planted.get(room, ""))
    (tmp_path / "tandem" / "__init__.py").touch()
    (tmp_path / "tandem_kernels").mkdir()
    (tmp_path / "tandem_kernels" / "__init__.py").touch()
    result = lint_imports(tmp_path, [tmp_path])
    assert result.returncode != 0
    for violation in ("tandem.kv -> tandem.sched", "tandem.runtime -> tandem.transfer", "tandem.core -> threading"):
        assert violation in " ".join(result.stdout.split()), result.stdout


def test_every_pure_room_is_under_the_purity_contract() -> None:
    rooms = {p.name for p in (ROOT / "services" / "tandem").iterdir() if (p / "__init__.py").is_file()}
    named = {module.removeprefix("tandem.") for module in contracts()["pure"]["source_modules"]}
    assert named == rooms & PURE


def test_every_room_but_runtime_is_kept_from_the_kernels() -> None:
    rooms = {p.name for p in (ROOT / "services" / "tandem").iterdir() if (p / "__init__.py").is_file()}
    named = {module.removeprefix("tandem.") for module in contracts()["kernels-users"]["source_modules"]}
    assert named >= rooms - {"runtime"}
    assert "runtime" not in named
