"""Reads between two processes in host memory, in both ways; what does not arrive is found, and MPS is ended again."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.kv import gpu_transfer
from loadtest.kv.device_memory import BenchHostMemory, CudaMemory, DeviceMemory
from loadtest.kv.gpu_transfer import Broken, GpuTransferCase, GpuTransferRow, content_of, copies_of, markdown, measure
from loadtest.processes.mps import CONTROL, MpsUnavailable, multi_process_service
from tandem.transfer.interface import BlockCopy
from tandem.transfer.process_memory import CopySpan
from tandem_kernels.native.build import _find_compiler

CASE = GpuTransferCase("cpu", 64, (1 << 20,), rounds=2, is_busy=False)


@pytest.mark.nightly
def test_two_processes_transfer_the_requested_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    argv = ["gpu-transfer", "--device", "cpu", "--kib", "64", "--mib", "0.25,1", "--rounds", "2", "--busy"]
    assert main([*argv, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [(row["num_blocks"], row["num_bytes"]) for row in rows] == [(4, 1 << 18), (16, 1 << 20)]
    for row in rows:
        assert 0 < row["best_nixl_s"] <= row["nixl_s"] and 0 < row["best_loop_s"] <= row["loop_s"]
        assert row["ratio"] == row["loop_s"] / row["nixl_s"] and row["is_busy"] and not row["is_mps"]
    assert "| 64 KiB | 16 | 1 |" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_failed_process_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NIXL_PLUGIN_DIR", "/nowhere")
    assert main(["gpu-transfer", "--device", "cpu", "--kib", "64", "--mib", "1", "--rounds", "1"]) == 1
    assert "loadtest gpu-transfer: the consumer failed" in capsys.readouterr().err


class Stub:
    """A consumer in this process whose ways copy, or do not."""

    def __init__(self, *, loses: str) -> None:
        self._loses = loses
        self._blocks: dict[int, bytes] = {}
        self.calls: list[str] = []

    def nixl(self, copies: Sequence[BlockCopy]) -> float:
        return self._move("nixl", copies)

    def loop(self, copies: Sequence[BlockCopy]) -> float:
        return self._move("loop", copies)

    def spoil(self, copies: Sequence[BlockCopy]) -> None:
        self._blocks |= {copy.local: b"" for copy in copies}

    def check(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            if self._blocks[copy.local] != content_of(copy.remote, 64):
                raise Broken(f"block {copy.remote} has not arrived")

    def _move(self, transport: str, copies: Sequence[BlockCopy]) -> float:
        self.calls.append(transport)
        if transport != self._loses:
            self._blocks |= {copy.local: content_of(copy.remote, 64) for copy in copies}
        return 2.0 if transport == "nixl" else 1.0


@pytest.mark.parametrize("transport", ["nixl", "loop"])
def test_a_transport_that_moves_nothing_is_found(transport: str) -> None:
    with pytest.raises(Broken, match="has not arrived"):
        measure(CASE, 1 << 20, Stub(loses=transport))  # type: ignore[arg-type]


def test_transports_alternate_and_a_ratio_is_of_bandwidths() -> None:
    stub = Stub(loses="")
    row = measure(CASE, 1 << 20, stub)  # type: ignore[arg-type]
    assert stub.calls == ["nixl", "loop"] * 3
    assert (row.ratio, row.num_blocks, row.num_bytes) == (0.5, 16, 1 << 20)


def test_blocks_are_of_the_requested_size_and_in_random_order() -> None:
    assert CASE.layout.block_bytes == 64 << 10 and CASE.num_blocks == 16
    assert GpuTransferCase("cpu", 2048, (256 << 20,), 1, False).blocks_of(256 << 20) == 128, (
        "2,048 tokens of an 8B model"
    )
    copies = copies_of(CASE, 16)
    for side in ("local", "remote"):
        blocks = [getattr(copy, side) for copy in copies]
        assert sorted(blocks) == list(range(16)) and blocks != sorted(blocks)
    assert content_of(3, 64) != content_of(4, 64) and len(content_of(3, 64)) == 64


def assert_copied(theirs: DeviceMemory, ours: DeviceMemory) -> tuple[int, int, int]:
    """Check that pieces of their memory get into ours. Return its address for them and for us, and that of our own."""
    source, target = theirs.allocate(8192), ours.allocate(8192)
    theirs.write(source, bytes(range(256)) * 32)
    remote = ours.open(theirs.share(source))
    ours.copy([CopySpan(remote + 4096, target, 100), CopySpan(remote + 1, target + 200, 3)])
    assert ours.read(target, 100) == bytes(range(100)) and ours.read(target + 200, 3) == b"\1\2\3"
    assert ours.read(target + 100, 100) == bytes(100)
    return source, remote, target


def test_host_memory_is_copied_piece_by_piece() -> None:
    assert_copied(BenchHostMemory(), BenchHostMemory())


DRIVER = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
// Memory of a device as files that processes map; a copy is there only once its stream was waited for.
struct Handle { char name[64]; };
static char names[8][64]; static char *places[8]; static int count = 0, ready = 0;
struct Copy { char *to; const char *from; size_t size; }; static Copy open_[64]; static int waiting = 0;
static char *map(int file, size_t size) {
    return (char *)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
}
extern "C" {
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal > 1 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(7 + device); return 0; }
int cuCtxSetCurrent(void *context) { ready = context != nullptr; return 0; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)9; return ready && flags == 1 ? 0 : 201; }
int cuMemAlloc_v2(uint64_t *at, size_t size) {
    int file = memfd_create("gpu", 0); if (ftruncate(file, size)) return 2;
    snprintf(names[count], 64, "/proc/%d/fd/%d", getpid(), file);
    places[count] = map(file, size); *at = (uint64_t)places[count++]; return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) { memcpy((void *)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { memcpy(to, (void *)from, size); return 0; }
int cuIpcGetMemHandle(Handle *handle, uint64_t at) {
    for (int i = 0; i < count; i++) if ((uint64_t)places[i] == at) { memcpy(handle->name, names[i], 64); return 0; }
    return 1;
}
int cuIpcOpenMemHandle_v2(uint64_t *at, Handle handle, unsigned flags) {
    *at = (uint64_t)map(open(handle.name, O_RDWR), 8192); return flags == 1 ? 0 : 1;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
    if (stream != (void *)9) return 400;
    if (size == 13) return 1;
    open_[waiting++] = {(char *)to, (const char *)from, size}; return 0;
}
int cuStreamSynchronize(void *stream) {
    for (; waiting; waiting--) memcpy(open_[waiting - 1].to, open_[waiting - 1].from, open_[waiting - 1].size);
    return stream == (void *)9 ? 0 : 400;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == 101 ? "CUDA_ERROR_INVALID_DEVICE" : nullptr; return 0;
}
}
"""


def test_a_gpu_s_memory_is_reached_by_the_driver_s_calls(tmp_path: Path) -> None:
    """Against a library of the same calls over the host's memory, because no GPU is here."""
    library = tmp_path / "libcuda.so"
    source = tmp_path / "driver.cpp"
    source.write_text(DRIVER)
    subprocess.run([_find_compiler(), "-shared", "-fPIC", "-o", library, source], check=True, timeout=100)
    theirs, ours = CudaMemory(library=str(library)), CudaMemory(1, library=str(library))
    assert (theirs.device, ours.device) == ("cuda:0", "cuda:1")
    source_at, remote, target = assert_copied(theirs, ours)
    assert remote not in (source_at, target)
    with pytest.raises(RuntimeError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        CudaMemory(2, library=str(library))
    with pytest.raises(RuntimeError, match="cuMemcpyDtoDAsync_v2: error 1"):
        ours.copy([CopySpan(remote, target, 13)])


def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--device", "cpu", "--mps"], ["--kib", "9"], ["--kib", "0"]):
        with pytest.raises(SystemExit):
            gpu_transfer.main(argv)
    assert "multiples of 8 KiB" in capsys.readouterr().err


def _control(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of the service's name that comes first on the path; it writes down how it was called."""
    log = folder / "log"
    program = folder / CONTROL
    program.write_text(f'#!/bin/sh\necho "$* $(cat) $CUDA_MPS_PIPE_DIRECTORY" >>{log}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return log


def test_the_service_is_private_and_ends_with_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _control(tmp_path, "exit 0", monkeypatch)
    with pytest.raises(ValueError, match="within"), multi_process_service():
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(folder).is_dir() and log.read_text().split() == ["-d", folder]
        raise ValueError("within")
    assert log.read_text().split()[2:] == ["quit", folder]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ and not Path(folder).exists()


def test_a_service_that_does_not_start_reports_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _control(tmp_path, "echo no device >&2; exit 3", monkeypatch)
    with pytest.raises(MpsUnavailable, match="no device"), multi_process_service():
        raise AssertionError("not reached")
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(MpsUnavailable, match="cannot be run"), multi_process_service():
        raise AssertionError("not reached")


def test_the_table_shows_what_the_producer_did() -> None:
    row = GpuTransferRow(2048, 128, 256 << 20, 0.002, 0.001, 0.002, 0.001, is_busy=True, is_mps=True)
    assert "| 2048 KiB | 128 | 256 | 2.000 | 134.2 | 1.000 | 268.4 | 50% | computes | yes |" in markdown([row])
