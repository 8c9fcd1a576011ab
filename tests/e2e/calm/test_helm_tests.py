"""Run the scripts of the `helm test` pods against a gateway of this machine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.e2e.gateway.pair import Pair

SCRIPTS = Path(__file__).resolve().parents[3] / "helm" / "tandem" / "files" / "tests"


async def run_script(script: str, **environment: str) -> tuple[int | None, str]:
    """Return the exit code and the output."""
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", (SCRIPTS / script).read_text()),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(done.communicate(), 60)
    return done.returncode, output.decode()


@pytest.mark.parametrize("script", ["ask_http.py", "ask_grpc.py"])
async def test_a_release_that_serves_passes(calm: Pair, script: str) -> None:
    code, output = await run_script(script, HTTP=calm.gateway.url, GRPC=calm.gateway.grpc_target)
    assert code == 0, output
    assert "text" in output or "content" in output


@pytest.mark.parametrize("script", ["ask_http.py", "ask_grpc.py"])
async def test_a_release_that_does_not_answer_fails(script: str) -> None:
    code, output = await run_script(script, HTTP="http://127.0.0.1:1", GRPC="127.0.0.1:1")
    assert code not in (0, None) and "Traceback" in output
