"""Check what compiled CPU kernels need: the processor's vector instructions and a C++ compiler."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from typing import Literal

from tandem.doctor.finding import Finding, ok, skip, warn, wrong
from tandem.doctor.system import System

COMPILERS = ("c++", "g++", "clang++")
"""Used if CXX is unset; the first that is found builds the kernels."""
_VECTORS = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("asimd", "NEON"))


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processor and compiler of this machine.

    `flags`: the processor's features, in the kernel's names. `compiler`: path of the C++ compiler, empty if none is
    found.
    """

    machine: str
    flags: frozenset[str]
    compiler: str


def read_cpu(system: System) -> Cpu:
    flags = frozenset[str]()
    for line in system.text("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            flags = frozenset(line.partition(":")[2].split())
            break
    names = [name for name in (system.environ.get("CXX"), *COMPILERS) if name]
    found = (shutil.which(name, path=system.environ.get("PATH")) for name in names)
    return Cpu(platform.machine(), flags, next(filter(None, found), ""))


def judge_cpu(cpu: Cpu, device: Literal["cpu", "cuda"], kernels: str) -> tuple[Finding, ...]:
    """Report missing vector instructions or a missing compiler, without which a CPU worker computes in plain torch:
    correctly, but slowly."""
    if device == "cuda":
        return (skip("cpu", "model.device is cuda, which uses no CPU kernels"),)
    return (_vectors(cpu), _compiler(cpu, is_fatal=kernels == "compiled"))


def _vectors(cpu: Cpu) -> Finding:
    for flag, name in _VECTORS:
        if flag in cpu.flags:
            return ok("cpu", f"{cpu.machine} with {name}")
    summary = f"{cpu.machine} with none of {', '.join(name for _, name in _VECTORS)}"
    return warn("cpu", f"{summary}: steps take several times as long", "run workers on a processor with AVX2 or NEON")


def _compiler(cpu: Cpu, *, is_fatal: bool) -> Finding:
    if cpu.compiler:
        return ok("compiler", cpu.compiler)
    return wrong(
        "compiler",
        f"no C++ compiler (looked for {', '.join(COMPILERS)})",
        "`apt-get install g++`, or CXX with the path of one; engine.kernels=reference does without, in plain torch",
        is_fatal=is_fatal,
    )
