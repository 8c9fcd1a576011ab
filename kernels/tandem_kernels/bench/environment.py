"""Describe the environment of a measurement: date, versions, device and its clocks."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime

import torch

_CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
_TIMEOUT_S = 20.0


def describe(device: torch.device, command: str) -> dict[str, str]:
    """Return command, date, versions and device by name, each as text."""
    facts = {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, Triton {_triton()}",
    }
    if device.type != "cuda":
        return facts | {"device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads"}
    properties = torch.cuda.get_device_properties(device)
    sizes = f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB"
    driver = query("driver_version")
    return facts | {"device": f"{properties.name}, {sizes}, CUDA {torch.version.cuda}, driver {driver}"}


def clocks() -> str:
    """Return the GPU's current clocks, temperature and power."""
    return query(_CLOCKS)


def query(fields: str) -> str:
    """Return what nvidia-smi reports for `fields` of the first GPU; "unknown" with the reason when it fails."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({type(error).__name__})"
    return (done.stdout.splitlines() or [f"unknown ({done.returncode})"])[0].strip()


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "not installed"
    return str(triton.__version__)
