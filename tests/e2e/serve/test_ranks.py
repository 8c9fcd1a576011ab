"""Test `tandem serve` with several ranks per worker: actors of each replica's placement group, which end with it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.gateway.tiny_model import make_model
from tests.e2e.serve.served import Served, until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

PATIENCE_S = 120.0
SETTINGS = ("--served-model-name", "tiny", "--dtype", "float64", "--kv-cache-memory", "32MiB", "--port", "0")


def ranks_of(served: Served) -> list[int]:
    """Processes of ranks that follow."""
    found = []
    for pid, _ in served.look():
        try:
            command = (Path("/proc") / str(pid) / "cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"ray::_Rank"):
            found.append(pid)
    return found


def complete(served: Served) -> tuple[str, str]:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
    response = httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"], response.headers["x-tandem-path"]


def test_ranks_are_actors_that_serve_heal_and_end_with_their_worker(tmp_path: Path) -> None:
    model = ("--model", str(make_model(tmp_path)))
    with Served(*model, *SETTINGS, "--tensor-parallel", "2").wait_ready() as served:
        text, path = complete(served)
        assert path == "remote"
        ranks = ranks_of(served)
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        assert complete(served)[0] == text

        def has_healed() -> bool:
            return len(set(ranks_of(served)) - {ranks[0]}) == 2 and complete(served)[1] == "remote"

        until(has_healed, PATIENCE_S, lambda: served.output)
        num_chars_before = len(served.output)
        served.process.send_signal(signal.SIGINT)
        assert served.wait_end() == 0
        assert re.findall(r"ERROR|Traceback|raylet", served.output[num_chars_before:]) == []
        served.wait_nothing_left()
