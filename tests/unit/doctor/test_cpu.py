"""Test the check of vector instructions and the compiler."""

from __future__ import annotations

from pathlib import Path

from tandem.doctor.cpu import Cpu, judge_cpu, read_cpu
from tests.unit.doctor.trees import system
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns

FLAGS = frozenset({"sse2", "avx2"})


def test_the_processor_and_the_compiler_are_read(tmp_path: Path) -> None:
    compiler = tmp_path / "bin/mycc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    info = {"/proc/cpuinfo": "processor\t: 0\nflags\t\t: sse2 avx2\n\nprocessor\t: 1\nflags\t\t: sse2\n"}
    found = read_cpu(system(tmp_path, info, PATH=str(compiler.parent), CXX="mycc"))
    assert (found.flags, found.compiler) == (FLAGS, str(compiler))
    assert read_cpu(system(tmp_path, info, PATH=str(compiler.parent))).compiler == ""


def test_a_processor_with_vectors_and_a_compiler() -> None:
    vectors, compiler = judge_cpu(Cpu("x86_64", FLAGS, "/usr/bin/c++"), "cpu", "auto")
    assert_fine(vectors, "cpu", "x86_64 with AVX2")
    assert_fine(compiler, "compiler", "/usr/bin/c++")


def test_a_compiler_is_needed_for_compiled_kernels() -> None:
    for kernels, judged in (("auto", assert_warns), ("compiled", assert_fails)):
        _, compiler = judge_cpu(Cpu("x86_64", FLAGS, ""), "cpu", kernels)
        judged(compiler, "compiler", "no C++ compiler", "`apt-get install g++`")


def test_a_processor_without_vectors_is_slow() -> None:
    vectors, _ = judge_cpu(Cpu("x86_64", frozenset({"sse2"}), "c++"), "cpu", "auto")
    assert_warns(vectors, "cpu", "none of AVX-512, AVX2, NEON", "AVX2 or NEON")


def test_on_a_gpu_the_processor_is_skipped() -> None:
    (finding,) = judge_cpu(Cpu("x86_64", frozenset(), ""), "cuda", "auto")
    assert_skips(finding, "cpu", "model.device is cuda")
