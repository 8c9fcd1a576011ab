"""Test what deploy/slim.py removes from an environment, on one with packages made up here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.deploy.files import DEPLOY


@pytest.fixture(scope="module")
def slim() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slim", DEPLOY / "slim.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for name, text in {
        "unused/__init__.py": "x = 1\n" * 100,
        "unused-1.0.dist-info/METADATA": "Name: unused\n",
        "used/__init__.py": "from used.generated import ANSWER\n",
        "used/generated/__init__.py": "ANSWER = 42\n" + "# a comment\n" * 100,
        "used/tests/test_it.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_package_goes_with_its_metadata(slim: ModuleType, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_lists(slim, monkeypatch, removed={"unused": "not needed", "*/**/tests": "tests"})
    saved = dict(slim.slim("image", packages))
    assert sorted(path.name for path in packages.iterdir()) == ["used"]
    assert not (packages / "used/tests").exists()
    assert saved["unused: not needed"] == 600 + len("Name: unused\n")


def test_generated_code_is_imported_without_its_source(
    slim: ModuleType, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_lists(slim, monkeypatch, bytecode_only=["used/generated"])
    ((_, saved_bytes),) = slim.slim("image", packages)
    assert saved_bytes > 0 and not list((packages / "used/generated").rglob("*.py"))
    command = [sys.executable, "-c", "import used; print(used.ANSWER)"]
    done = subprocess.run(command, cwd=packages, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "42"


def test_the_log_names_a_pattern_that_matches_nothing(
    slim: ModuleType, packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _set_lists(slim, monkeypatch, removed={"gone/*": "was there once"}, bytecode_only=["gone"])
    assert dict(slim.slim("image", packages)) == {"gone/*: was there once": 0}
    assert capsys.readouterr().out.splitlines() == ["gone/* matches nothing", "gone matches nothing"]


def _set_lists(
    slim: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    removed: dict[str, str] | None = None,
    bytecode_only: list[str] | None = None,
) -> None:
    monkeypatch.setattr(slim, "REMOVED", {"image": removed or {}})
    monkeypatch.setattr(slim, "BYTECODE_ONLY", {"image": bytecode_only or []})
    monkeypatch.setattr(slim, "STRIPPED", {"image": []})
