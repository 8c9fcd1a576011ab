"""Test the check of vector instructions and the compiler."""

from __future__ import annotations

import platform
from pathlib import Path

from tandem.core.config import Config, EngineConfig, ModelConfig
from tandem.doctor.host import check_cpu
from tests.unit.doctor.trees import system
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns

INFO = {"/proc/cpuinfo": "processor\t: 0\nflags\t\t: sse2 avx2\n\nprocessor\t: 1\nflags\t\t: sse2\n"}


def test_a_processor_with_vectors_and_a_compiler(tmp_path: Path) -> None:
    compiler = tmp_path / "bin/mycc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    here = system(tmp_path, INFO, PATH=str(compiler.parent), CXX="mycc")
    vectors, found = check_cpu(here, Config())
    assert_fine(vectors, "cpu", f"{platform.machine()} with AVX2")
    assert_fine(found, "compiler", str(compiler))


def test_a_compiler_is_needed_for_compiled_kernels(tmp_path: Path) -> None:
    compiled = Config(engine=EngineConfig(kernels="compiled"))
    for config, judged in ((Config(), assert_warns), (compiled, assert_fails)):
        _, compiler = check_cpu(system(tmp_path, INFO, PATH=str(tmp_path)), config)
        judged(compiler, "compiler", "no C++ compiler", "`apt-get install g++`")


def test_a_processor_without_vectors_is_slow(tmp_path: Path) -> None:
    vectors, _ = check_cpu(system(tmp_path, {"/proc/cpuinfo": "flags: sse2"}), Config())
    assert_warns(vectors, "cpu", "none of AVX-512, AVX2, NEON", "AVX2 or NEON")


def test_on_a_gpu_the_processor_is_skipped(tmp_path: Path) -> None:
    (finding,) = check_cpu(system(tmp_path, {}), Config(model=ModelConfig(device="cuda")))
    assert_skips(finding, "cpu", "model.device is cuda")
