"""Lets processes of one GPU compute side by side while a measurement runs; changes no setting of the device.

NVIDIA's multi-process service: without it processes take turns on the GPU, so a read stands still while another one
computes.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
_TIMEOUT_S = 30.0


class MpsUnavailable(Exception):
    """The service cannot be started; says why."""


@contextmanager
def multi_process_service() -> Iterator[None]:
    """Processes started meanwhile are its clients, all others are left alone. Raises MpsUnavailable."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        before = {name: os.environ.get(name) for name in places}
        os.environ.update(places)
        try:
            _control(["-d"], "")
            try:
                yield
            finally:
                _control([], "quit\n")
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _control(arguments: list[str], told: str) -> None:
    try:
        done = subprocess.run(
            [CONTROL, *arguments], input=told, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MpsUnavailable(f"{CONTROL} cannot be run: {error}") from error
    if done.returncode:
        raise MpsUnavailable(f"{CONTROL} {' '.join(arguments)}: {(done.stderr or done.stdout).strip()[-300:]}")
