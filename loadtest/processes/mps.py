"""Let processes of one GPU compute concurrently during a measurement, through NVIDIA's multi-process service (MPS).

Without the service processes take turns on the GPU, so a read stands still while another process computes. No setting
of the device is changed.
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
    """Raised when the service cannot be started; the message gives the reason."""


@contextmanager
def multi_process_service() -> Iterator[None]:
    """Run NVIDIA's multi-process service inside the context; processes started meanwhile use it. Raises
    MpsUnavailable."""
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


def _control(arguments: list[str], stdin_text: str) -> None:
    try:
        done = subprocess.run(
            [CONTROL, *arguments], input=stdin_text, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MpsUnavailable(f"{CONTROL} cannot be run: {error}") from error
    if done.returncode:
        raise MpsUnavailable(f"{CONTROL} {' '.join(arguments)}: {(done.stderr or done.stdout).strip()[-300:]}")
