"""Runs programs that compile for a GPU, in processes that do not interpret; looks at nothing that they print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def lines_of(program: ModuleType, cache: Path, *arguments: str) -> list[str]:
    """What it prints. A warning is an error."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-m", program.__name__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()
