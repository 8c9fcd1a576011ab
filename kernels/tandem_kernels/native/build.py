"""Compile the C++ sources for the processor of this machine, once, into a cached shared library.

The library is in the user's cache under a name derived from sources, compiler, flags and processor, so that a change of
any of them triggers a new build and machines that share a home directory do not share a library.
`python -m tandem_kernels.native.build` builds it ahead of time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent / "src"
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 600

_log = logging.getLogger(__name__)


class NativeUnavailable(Exception):
    """Raised when the compiled kernels cannot be built or loaded; the message gives the reason.

    Callers can use the reference kernels instead.
    """


def library_file() -> Path:
    """Return the path of the compiled library, building it if needed. Raises NativeUnavailable."""
    compiler = _find_compiler()
    target = _cache() / f"kernels-{_key(compiler)}.so"
    if not target.is_file():
        _log.info("compiling the kernels")
        _compile(compiler, target)
    return target


def _find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), *_COMPILERS)):
        found = shutil.which(name)
        if found is not None:
            return found
    raise NativeUnavailable(f"no C++ compiler (looked for {', '.join(_COMPILERS)}; CXX names another one)")


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "tandem" / "kernels"


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(f"{source.name}\0".encode() + source.read_bytes())
    for part in (_version(compiler), *_FLAGS, _processor()):
        digest.update(f"\0{part}".encode())
    return digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NativeUnavailable(f"{compiler} --version failed: {done.stderr.strip()}")
    return done.stdout


def _processor() -> str:
    """Describe the processor features that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    prefixes = ("model name", "cpu family", "model\t", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(prefixes)}))


def _compile(compiler: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        output = Path(folder) / target.name
        command = [compiler, *_FLAGS, str(_SOURCES / "exports.cpp"), "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise NativeUnavailable(f"{compiler} took more than {_TIMEOUT_S} s") from None
        if done.returncode:
            raise NativeUnavailable(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
        # The rename is atomic, even if several processes build at once.
        os.replace(output, target)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{library_file()}\n")
    except NativeUnavailable as reason:
        sys.exit(f"compiled kernels are not available: {reason}")
