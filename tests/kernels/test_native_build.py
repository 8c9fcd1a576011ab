"""The library is built once, under a name that changes with what it is made from; without a compiler it says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem_kernels.native import build
from tandem_kernels.native.build import NativeUnavailable, library_file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tandem" / "kernels"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in no time."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "exports.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "_SOURCES", folder)
    return folder


def test_built_once(cache: Path, sources: Path) -> None:
    first = library_file()
    stamp = first.stat().st_mtime_ns
    assert library_file() == first and first.stat().st_mtime_ns == stamp
    assert [path.name for path in cache.iterdir()] == [first.name], "nothing of the build is left"


def test_another_source_is_another_library(cache: Path, sources: Path) -> None:
    first = library_file()
    (sources / "exports.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert library_file() != first
    assert len(list(cache.iterdir())) == 2


def test_a_missing_compiler_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler"):
        library_file()


def test_a_source_that_does_not_compile_is_an_error_with_the_compiler_s_message(cache: Path, sources: Path) -> None:
    (sources / "exports.cpp").write_text("this is no program\n")
    with pytest.raises(NativeUnavailable, match="failed"):
        library_file()
    assert not list(cache.iterdir())
