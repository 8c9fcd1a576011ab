"""Check the GPUs, their driver, and whether torch and NIXL are built for it, without computing on a GPU."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.config import Config
from tandem.doctor.finding import Finding, fail, format_bytes, format_version, ok, skip, warn, wrong
from tandem.doctor.system import System

QUERY_S, TORCH_S = 10.0, 30.0
"""Time limits: a failing driver answers late or not at all; torch takes seconds to load its libraries."""
LIMIT_S = 2 * QUERY_S + TORCH_S + 5
_FIELDS = "name,driver_version,memory.total,memory.used,compute_mode,persistence_mode,mig.mode.current"
_TORCH = """
import importlib.util, json, torch
nixl = [name for name in ("nixl_cu12", "nixl_cu13") if importlib.util.find_spec(name)]
cuda = torch.cuda
print(json.dumps([torch.__version__, torch.version.cuda, cuda.is_available(), cuda.device_count(), nixl]))
"""
_IN_A_POD = (
    "in a pod set `pools.<name>.gpus` and `pools.<name>.runtimeClassName`, with NVIDIA's device plugin on the node"
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """Hold the state of a GPU, as nvidia-smi reports it.

    `name`: name of the GPU model. `num_bytes`, `num_used_bytes`: size of its memory, and how much of it is in use; 0 if
    not reported. `compute_mode`, `persistence` and `mig`: texts as nvidia-smi prints them."""

    name: str
    num_bytes: int
    num_used_bytes: int
    compute_mode: str
    persistence: str
    mig: str


@dataclass(frozen=True, slots=True)
class Driver:
    """Hold the state of this machine's NVIDIA driver and its GPUs.

    `problem`: why nvidia-smi failed, else empty. `version`: version of the driver. `cuda`: newest CUDA version that the
    driver supports, such as (13, 0); (0, 0) if unknown. `gpus`: the GPUs in the order of nvidia-smi."""

    problem: str = ""
    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Torch:
    """Describe the installed torch and NIXL.

    `problem`: why torch cannot be imported, else empty. `version`: version of torch. `cuda`: CUDA version of the torch
    build, None for a build without CUDA. `sees_gpu`, `num_gpus`: whether torch can use a GPU, and how many GPUs it
    sees. `nixl`: installed variants of NIXL, such as ("cu12",)."""

    problem: str = ""
    version: str = ""
    cuda: tuple[int, int] | None = None
    sees_gpu: bool = False
    num_gpus: int = 0
    nixl: tuple[str, ...] = ()


def read_driver(system: System) -> Driver:
    ran = system.run(["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"], QUERY_S)
    if ran.code:
        return Driver(problem=ran.problem)
    return parse_driver(ran.out, system.run(["nvidia-smi"], QUERY_S).out)


def parse_driver(rows: str, banner: str) -> Driver:
    """Parse the output of nvidia-smi, and return the driver with its GPUs.

    `rows`: output of `nvidia-smi --query-gpu`, one line per GPU with the queried fields in their order. `banner`:
    output of nvidia-smi without arguments, the only output that has the CUDA version."""
    gpus, version = [], ""
    for line in filter(None, map(str.strip, rows.splitlines())):
        name, version, total, used, mode, persistence, mig = (cell.strip() for cell in line.split(","))
        gpus.append(Gpu(name, _mib(total), _mib(used), mode, persistence, mig))
    found = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+)\.(\d+)", banner)
    return Driver(version=version, cuda=(int(found[1]), int(found[2])) if found else (0, 0), gpus=tuple(gpus))


def read_torch(system: System) -> Torch:
    """Return what torch reports about itself and the GPUs, and the installed variants of NIXL.

    torch runs in another process, because a process that has initialized CUDA keeps memory on the GPU. Blocks for up to
    `TORCH_S` seconds. If torch fails, the result has the reason in `problem`."""
    ran = system.run([sys.executable, "-c", _TORCH], TORCH_S)
    if ran.code:
        return Torch(problem=ran.problem)
    version, cuda, sees_gpu, num_gpus, nixl = json.loads(ran.out.splitlines()[-1])
    return Torch("", version, _version(cuda) if cuda else None, sees_gpu, num_gpus, tuple(n[5:] for n in nixl))


def check_gpus(system: System, config: Config) -> tuple[Finding, ...]:
    """Return findings on the driver and the GPUs, and on whether torch and NIXL are built for them. Skipped if
    `model.device` is cpu; blocks for up to `LIMIT_S` seconds."""
    if config.model.device == "cpu":
        return skip("gpu", "model.device is cpu"), skip("cuda", "model.device is cpu")
    driver = read_driver(system)
    return (*judge_gpus(driver, config), *judge_cuda(read_torch(system), driver))


def judge_gpus(driver: Driver, config: Config) -> tuple[Finding, ...]:
    if driver.problem:
        fix = f"install NVIDIA's driver (`nvidia-smi` must list the GPUs); {_IN_A_POD}"
        return (fail("gpu", f"NVIDIA's driver does not answer: {driver.problem}", fix),)
    if not driver.gpus:
        fix = f"check that `nvidia-smi` lists the GPUs; {_IN_A_POD}"
        return (fail("gpu", f"driver {driver.version or 'unknown'} and no GPU", fix),)
    needs_ipc = config.transfer.require == "cuda_ipc"
    share = config.engine.gpu_memory_utilization
    return tuple(f for i, gpu in enumerate(driver.gpus) for f in _gpu(i, gpu, driver.version, share, needs_ipc))


def judge_cuda(torch: Torch, driver: Driver) -> tuple[Finding, ...]:
    if torch.problem:
        fix = "run `pip install 'tandem[worker]'` with torch's index for CUDA"
        return (fail("cuda", f"torch cannot be imported: {torch.problem}", fix),)
    if torch.cuda is None:
        fix = "run `pip install torch --index-url` of the CUDA build (pytorch.org says which), or set model.device=cpu"
        return (fail("cuda", f"torch {torch.version} was built without CUDA", fix),)
    built = f"torch {torch.version} for CUDA {format_version(torch.cuda)}"
    if driver.cuda != (0, 0) and torch.cuda[0] > driver.cuda[0]:
        fix = f"install a driver for CUDA {torch.cuda[0]} or later, or a torch built for CUDA {driver.cuda[0]}"
        return (fail("cuda", f"{built}, and the driver knows CUDA {format_version(driver.cuda)} at most", fix),)
    if not torch.sees_gpu:
        fix = f"give this user access to /dev/nvidia*, and let CUDA_VISIBLE_DEVICES name a GPU; {_IN_A_POD}"
        return (fail("cuda", f"{built} sees no GPU", fix),)
    return (ok("cuda", f"{built} sees {torch.num_gpus} GPU{'s' * (torch.num_gpus > 1)}"), _nixl(torch, torch.cuda[0]))


def _nixl(torch: Torch, major: int) -> Finding:
    summary = f"NIXL for {', '.join(torch.nixl) or 'no CUDA at all'}"
    if f"cu{major}" in torch.nixl:
        return ok("cuda", summary)
    extra = "worker,cuda" if major == 13 else "worker"
    return warn(
        "cuda",
        f"{summary}, and torch for CUDA {major}: a worker would load both",
        f"run `pip install 'tandem[{extra}]'`",
    )


def _gpu(index: int, gpu: Gpu, driver: str, share: float, needs_ipc: bool) -> Sequence[Finding]:
    size = format_bytes(gpu.num_bytes) if gpu.num_bytes else "memory of unknown size"
    summary = f"{index} {gpu.name}, driver {driver}, {size}"
    found: list[Finding] = []
    if gpu.compute_mode == "Prohibited":
        unusable = f"{summary}: no process may compute on it (compute mode Prohibited)"
        found.append(fail("gpu", unusable, f"run `nvidia-smi -i {index} -c DEFAULT`"))
    if gpu.compute_mode.startswith("Exclusive"):
        several = f"{summary}: one process only (compute mode {gpu.compute_mode}), and several workers share a GPU"
        found.append(warn("gpu", several, f"run `nvidia-smi -i {index} -c DEFAULT`, or start one worker for each GPU"))
    if gpu.mig == "Enabled":
        fix = f"run `nvidia-smi -i {index} -mig 0`, or set transfer.require=any"
        found.append(wrong("gpu", f"{summary}: MIG is on, and its slices have no cuda_ipc", fix, is_fatal=needs_ipc))
    num_free = gpu.num_bytes - gpu.num_used_bytes
    if gpu.num_bytes and num_free < share * gpu.num_bytes:
        fix = "end other processes on it (`nvidia-smi` lists them), or lower engine.gpu_memory_utilization"
        left = (
            f"{summary}: {num_free / gpu.num_bytes:.0%} are free, and a worker would take "
            f"engine.gpu_memory_utilization={share:g}"
        )
        found.append(warn("gpu", left, fix))
    if gpu.persistence == "Disabled":
        slow = f"{summary}: without persistence mode each start takes seconds longer"
        found.append(warn("gpu", slow, "run `nvidia-smi -pm 1`, or start the nvidia-persistenced service"))
    free = f", {num_free / gpu.num_bytes:.0%} free" if gpu.num_bytes else ""
    return found or (ok("gpu", f"{summary}{free}"),)


def _mib(text: str) -> int:
    """Convert a number of MiB to bytes; 0 if the driver does not report it."""
    return int(text) << 20 if text.isdecimal() else 0


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)
