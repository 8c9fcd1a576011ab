"""Test the check of GPUs with recorded output of nvidia-smi and torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.core.config import Config, ModelConfig, TransferConfig
from tandem.doctor.gpu import (
    Driver,
    Gpu,
    Torch,
    check_gpus,
    judge_cuda,
    judge_gpus,
    parse_driver,
    read_driver,
    read_torch,
)
from tandem.doctor.system import Ran, System
from tests.unit.doctor.trees import system
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns

GIB = 1 << 30
CUDA = Config(model=ModelConfig(device="cuda"))
ROW = "NVIDIA H100 80GB HBM3, 580.65.06, 81559, 0, Default, Enabled, Disabled"
BANNER = "| NVIDIA-SMI 580.65.06     Driver Version: 580.65.06      CUDA Version: 13.0     |\n"
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559 << 20, 0, "Default", "Enabled", "Disabled")
DRIVER = Driver("", "580.65.06", (13, 0), (H100,))
TORCH = Torch("", "2.13.0+cu130", (13, 0), True, 1, ("cu12", "cu13"))


def test_what_nvidia_smi_prints_is_read() -> None:
    assert parse_driver(ROW + "\n", BANNER) == DRIVER
    old = parse_driver("Tesla T4, 525.1, [N/A], 12, Exclusive_Process, Disabled, [N/A]", "no banner")
    assert (old.cuda, old.gpus[0].num_bytes, old.gpus[0].compute_mode) == ((0, 0), 0, "Exclusive_Process")


def test_newer_drivers_name_their_cuda_otherwise() -> None:
    assert parse_driver(ROW, "CUDA UMD Version: 13.1").cuda == (13, 1)


def test_nvidia_smi_is_run_as_a_program() -> None:
    def smi(command: Sequence[str], _limit_s: float, _environ: Mapping[str, str]) -> Ran:
        assert command[0] == "nvidia-smi"
        return Ran(0, ROW if len(command) > 1 else BANNER, "")

    assert read_driver(System(runner=smi)) == DRIVER


def test_a_machine_without_a_driver(tmp_path: Path) -> None:
    found = read_driver(system(tmp_path, {}))
    assert found == Driver(problem="nvidia-smi is not installed")
    (finding,) = judge_gpus(found, CUDA)
    assert_fails(finding, "gpu", "nvidia-smi is not installed", "install NVIDIA's driver")
    assert "`pools.<name>.gpus`" in finding.fix


def test_torch_is_queried_in_another_process() -> None:
    output = json.dumps(["2.13.0+cu130", "13.0", True, 1, ["nixl_cu12", "nixl_cu13"]])
    assert read_torch(System(runner=lambda *_: Ran(0, f"noise\n{output}\n", ""))) == TORCH
    crash = "Traceback\nImportError: libcudart.so.13: cannot open shared object file"
    assert read_torch(System(runner=lambda *_: Ran(1, "", crash))).problem == crash.splitlines()[1]
    assert read_torch(System(runner=lambda *_: Ran(-9, "", ""))).problem == "exit code -9"


def test_a_gpu_that_is_fine() -> None:
    (finding,) = judge_gpus(DRIVER, CUDA)
    assert_fine(finding, "gpu", "0 NVIDIA H100 80GB HBM3, driver 580.65.06, 79.6GiB, 100% free")


def test_a_gpu_whose_memory_is_not_reported() -> None:
    found = parse_driver("NVIDIA GB10, 580.95.05, [N/A], [N/A], Default, Enabled, [N/A]", BANNER)
    (finding,) = judge_gpus(found, CUDA)
    assert_fine(finding, "gpu", "0 NVIDIA GB10, driver 580.95.05, memory of unknown size")
    (finding,) = judge_gpus(parse_driver("Tesla T4, 525.1, [N/A], 12, Default, Enabled, [N/A]", BANNER), CUDA)
    assert_fine(finding, "gpu", "0 Tesla T4, driver 525.1, memory of unknown size")


def test_no_gpu_at_all() -> None:
    (finding,) = judge_gpus(Driver(version="580"), CUDA)
    assert_fails(finding, "gpu", "driver 580 and no GPU", "`nvidia-smi` lists the GPUs")


@pytest.mark.parametrize(
    ("gpu", "found", "fix"),
    [
        (replace(H100, compute_mode="Exclusive_Process"), "one process only", "`nvidia-smi -i 0 -c DEFAULT`"),
        (replace(H100, mig="Enabled"), "MIG is on", "`nvidia-smi -i 0 -mig 0`"),
        (replace(H100, num_used_bytes=20 * GIB), "75% are free", "engine.gpu_memory_utilization"),
        (replace(H100, persistence="Disabled"), "without persistence mode", "`nvidia-smi -pm 1`"),
    ],
    ids=["exclusive", "mig", "used", "persistence"],
)
def test_a_gpu_to_look_at(gpu: Gpu, found: str, fix: str) -> None:
    (finding,) = judge_gpus(replace(DRIVER, gpus=(gpu,)), CUDA)
    assert_warns(finding, "gpu", found, fix)


def test_a_gpu_that_nobody_may_use() -> None:
    (finding,) = judge_gpus(replace(DRIVER, gpus=(replace(H100, compute_mode="Prohibited"),)), CUDA)
    assert_fails(finding, "gpu", "no process may compute on it", "-c DEFAULT")


def test_mig_slices_have_no_cuda_ipc() -> None:
    config = replace(CUDA, transfer=TransferConfig(require="cuda_ipc"))
    (finding,) = judge_gpus(replace(DRIVER, gpus=(replace(H100, mig="Enabled"),)), config)
    assert_fails(finding, "gpu", "its slices have no cuda_ipc", "transfer.require=any")


def test_torch_and_nixl_that_fit() -> None:
    cuda, nixl = judge_cuda(TORCH, DRIVER)
    assert_fine(cuda, "cuda", "torch 2.13.0+cu130 for CUDA 13.0 sees 1 GPU")
    assert_fine(nixl, "cuda", "NIXL for cu12, cu13")


@pytest.mark.parametrize(
    ("torch", "driver", "found", "fix"),
    [
        (Torch(problem="no libc"), DRIVER, "torch cannot be imported: no libc", "`pip install 'tandem[worker]'`"),
        (replace(TORCH, cuda=None), DRIVER, "was built without CUDA", "model.device=cpu"),
        (TORCH, replace(DRIVER, cuda=(12, 8)), "the driver knows CUDA 12.8 at most", "a torch built for CUDA 12"),
        (replace(TORCH, sees_gpu=False), DRIVER, "sees no GPU", "/dev/nvidia*"),
    ],
    ids=["broken", "cpu build", "old driver", "blind"],
)
def test_a_torch_that_does_not(torch: Torch, driver: Driver, found: str, fix: str) -> None:
    (finding,) = judge_cuda(torch, driver)
    assert_fails(finding, "cuda", found, fix)


def test_a_nixl_of_another_cuda() -> None:
    _, nixl = judge_cuda(replace(TORCH, nixl=("cu12",)), DRIVER)
    assert_warns(nixl, "cuda", "NIXL for cu12, and torch for CUDA 13", "`pip install 'tandem[worker,cuda]'`")


def test_on_a_cpu_gpus_are_skipped(tmp_path: Path) -> None:
    gpu, cuda = check_gpus(system(tmp_path, {}), Config())
    assert_skips(gpu, "gpu", "model.device is cpu")
    assert_skips(cuda, "cuda", "model.device is cpu")
