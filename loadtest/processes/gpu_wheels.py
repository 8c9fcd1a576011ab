"""Download the wheels that a GPU machine without package access may lack, in parcels of limited size.

    python -m loadtest.processes.gpu_wheels FOLDER     (in Tandem's environment, with access to a package index)

`tandem serve` needs about a hundred packages, 310 MiB with the model, and one call to the GPU machine carries 64 MiB.
FOLDER/1 to FOLDER/6 are the parcels: the first two hold the wheels of nixl-cu13 and llguidance, which single parts of
`gpu_session.sh` need, and both the one of msgspec, which every part needs; each parcel from the second on also holds a
piece of one archive of all other wheels.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tandem.runtime.model_store import PACKAGED

ROOT = Path(__file__).resolve().parents[2]
PARCEL_BYTES = 56 << 20
"""Largest parcel. A call carries 64 MiB, and the repository needs the rest."""

_TANDEM = ("tandem[gateway]", "tandem[worker]")
_TESTS = ("hypothesis", "pytest-asyncio", "pytest-timeout", "transformers")
_PREINSTALLED = frozenset({"torch", "pytest"})
"""Packages that the GPU machine has already, with their own dependencies."""
_REPLACEMENTS = {"nixl-cu12": "nixl-cu13"}
"""Replacements that match the CUDA version of the GPU machine's driver."""
_PYTHON = {
    "implementation_name": "cpython",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.12.3",
    "python_version": "3.12",
    "sys_platform": "linux",
}
_TAGS = (*(f"manylinux_2_{minor}" for minor in range(39, 16, -1)), "manylinux2014", "manylinux2010", "manylinux1")
"""Platform tags to accept. pip matches tags exactly, so all are listed; 2_39 is the GPU machine's glibc."""


def needed() -> list[str]:
    """List `NAME==VERSION` of each package that `tandem serve` and its tests need on a machine with torch and pytest.

    Versions are those of constraints.txt. Raises PackageNotFoundError if this environment lacks a package."""
    versions = _versions()
    names = {_REPLACEMENTS.get(name, name) for name in _walk([Requirement(text) for text in (*_TANDEM, *_TESTS)])}
    models = (model.requirement for model in PACKAGED.values())
    return sorted([*(f"{name}=={versions[name]}" for name in names - {"tandem"}), *models])


def pack(folder: Path) -> None:
    """Download all wheels and fill `folder` with parcels. Raises CalledProcessError when a download fails."""
    with tempfile.TemporaryDirectory() as scratch:
        rest = Path(scratch) / "rest"
        _download(rest)
        (shared,) = rest.glob("msgspec-*.whl")
        alone = ("nixl_cu13", "llguidance")
        for number, name in enumerate(alone, start=1):
            (folder / str(number)).mkdir(parents=True)
            (wheel,) = rest.glob(f"{name}-*.whl")
            wheel.rename(folder / str(number) / wheel.name)
            shutil.copy(shared, folder / str(number) / shared.name)
        archive = Path(scratch) / "rest.tar"
        with tarfile.open(archive, "w") as stream:
            stream.add(rest, arcname=".")
        _cut(archive, folder, len(alone))


def _versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    found: dict[str, str] = {canonicalize_name(name): version for name, version in pairs}
    return found | {other: found[name] for name, other in _REPLACEMENTS.items()}


def _walk(pending: list[Requirement]) -> set[str]:
    """Return the names of the transitive dependencies of requirements, from the metadata of installed packages."""
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if name not in _PREINSTALLED and (name, extra) not in seen:
                seen.add((name, extra))
                pending += _needs(name, extra)
    return {name for name, _ in seen}


def _needs(name: str, extra: str) -> Iterator[Requirement]:
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({**_PYTHON, "extra": extra}):
            yield requirement


def _download(folder: Path) -> None:
    tags = [word for tag in _TAGS for word in ("--platform", f"{tag}_x86_64")]
    options = ["--python-version", "3.12", "--implementation", "cp", *tags, "--only-binary=:all:", *needed()]
    _pip("download", "--no-deps", "--dest", str(folder), *options)
    # Tandem itself is included because it reads its own metadata at run time.
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words], check=True)


def _cut(archive: Path, folder: Path, first: int) -> None:
    """Cut an archive into parcels from number `first` on, filling each up to `PARCEL_BYTES`."""
    number = first
    with archive.open("rb") as stream:
        while True:
            parcel = folder / str(number)
            parcel.mkdir(exist_ok=True)
            piece = stream.read(PARCEL_BYTES - sum(file.stat().st_size for file in parcel.iterdir()))
            if not piece:
                parcel.rmdir()
                return
            (parcel / f"rest.tar.{number}").write_bytes(piece)
            number += 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m loadtest.processes.gpu_wheels FOLDER")
    pack(Path(sys.argv[1]))
