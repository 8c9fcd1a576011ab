"""Whether compiled kernels can be had: the processor's vectors and a C++ compiler; never compiles anything."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from typing import Literal

from tandem.doctor.finding import Finding, ok, skip, warn, wrong
from tandem.doctor.system import System

COMPILERS = ("c++", "g++", "clang++")
"""Where CXX names none; the first that is found builds the kernels."""
_VECTORS = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("asimd", "NEON"))


@dataclass(frozen=True, slots=True)
class Cpu:
    """`compiler` is its path, empty where none is found; `flags` as the kernel calls the processor's features."""

    machine: str
    flags: frozenset[str]
    compiler: str


def read_cpu(system: System) -> Cpu:
    flags = frozenset[str]()
    for line in system.text("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            flags = frozenset(line.partition(":")[2].split())
            break
    wanted = [name for name in (system.environ.get("CXX"), *COMPILERS) if name]
    found = (shutil.which(name, path=system.environ.get("PATH")) for name in wanted)
    return Cpu(platform.machine(), flags, next(filter(None, found), ""))


def judge_cpu(cpu: Cpu, device: Literal["cpu", "cuda"], kernels: str) -> tuple[Finding, ...]:
    """Without a compiler or vectors a CPU worker computes in plain torch, which is right and slow."""
    if device == "cuda":
        return (skip("cpu", "model.device is cuda, whose kernels are not the processor's"),)
    return (_vectors(cpu), _compiler(cpu, is_fatal=kernels == "compiled"))


def _vectors(cpu: Cpu) -> Finding:
    for flag, name in _VECTORS:
        if flag in cpu.flags:
            return ok("cpu", f"{cpu.machine} with {name}")
    told = f"{cpu.machine} with none of {', '.join(name for _, name in _VECTORS)}"
    return warn("cpu", f"{told}: steps take several times as long", "run workers on a processor with AVX2 or NEON")


def _compiler(cpu: Cpu, *, is_fatal: bool) -> Finding:
    if cpu.compiler:
        return ok("compiler", cpu.compiler)
    return wrong(
        "compiler",
        f"no C++ compiler (looked for {', '.join(COMPILERS)})",
        "`apt-get install g++`, or CXX with the path of one; engine.kernels=reference does without, in plain torch",
        is_fatal=is_fatal,
    )
