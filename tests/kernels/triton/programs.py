"""Runs programs that compile for a GPU, in a process that does not interpret; looks at nothing that they print."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def lines_of(programs: Mapping[str, Sequence[str]], cache: Path) -> dict[str, list[str]]:
    """Run modules of this folder with their arguments, one after the other in one process, so that what several of them
    need is loaded and compiled once. Return what each printed. A warning is an error."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-m", __name__, json.dumps(programs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    outputs: dict[str, list[str]] = json.loads(done.stdout)
    return outputs


def _run_all(programs: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    outputs = {}
    for name, arguments in programs.items():
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            importlib.import_module(f"tests.kernels.triton.{name}").main(arguments)
        outputs[name] = printed.getvalue().splitlines()
    return outputs


if __name__ == "__main__":
    json.dump(_run_all(json.loads(sys.argv[1])), sys.stdout)
