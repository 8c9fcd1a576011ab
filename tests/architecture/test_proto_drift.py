"""The committed protobuf modules are what `make proto` would write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_regeneration_changes_nothing() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "generate_proto.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
