"""Check what compiled CPU kernels need: the processor's vector instructions and a C++ compiler."""

from __future__ import annotations

import platform
import shutil
from typing import Literal

from tandem.doctor.finding import Finding, ok, skip, warn, wrong
from tandem.doctor.system import System

COMPILERS = ("c++", "g++", "clang++")
"""Used if CXX is unset; the first that is found builds the kernels."""
_VECTORS = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("asimd", "NEON"))


def check_cpu(system: System, device: Literal["cpu", "cuda"], kernels: str) -> tuple[Finding, ...]:
    """Return findings on the processor's vector instructions and on the C++ compiler, which CPU kernels need. `device`:
    value of model.device; with cuda the check is skipped. `kernels`: value of engine.kernels.

    Without vector instructions or compiler a CPU worker computes correctly but slowly, which is a warning. A missing
    compiler is a failure if `kernels` is "compiled"."""
    if device == "cuda":
        return (skip("cpu", "model.device is cuda, which uses no CPU kernels"),)
    return (_vectors(system), _compiler(system, is_fatal=kernels == "compiled"))


def _vectors(system: System) -> Finding:
    lines = system.text("/proc/cpuinfo").splitlines()
    features = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    machine = platform.machine()
    for flag, name in _VECTORS:
        if flag in features:
            return ok("cpu", f"{machine} with {name}")
    summary = f"{machine} with none of {', '.join(name for _, name in _VECTORS)}"
    return warn("cpu", f"{summary}: steps take several times as long", "run workers on a processor with AVX2 or NEON")


def _compiler(system: System, *, is_fatal: bool) -> Finding:
    for name in filter(None, (system.environ.get("CXX"), *COMPILERS)):
        if found := shutil.which(name, path=system.environ.get("PATH")):
            return ok("compiler", found)
    return wrong(
        "compiler",
        f"no C++ compiler ({', '.join(COMPILERS)}): CPU kernels cannot be built, and torch's own are slower",
        "run `apt-get install g++`, or set CXX to the path of one; engine.kernels=reference does without",
        is_fatal=is_fatal,
    )
