"""What the pods of `helm test` run, run against a gateway of this machine; never in a pod."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.e2e.gateway.pair import Pair

SCRIPTS = Path(__file__).resolve().parents[3] / "helm" / "tandem" / "files" / "tests"


async def ask(script: str, **environment: str) -> tuple[int | None, str]:
    """Exit code and what was said."""
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", (SCRIPTS / script).read_text()),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await asyncio.wait_for(done.communicate(), 60)
    return done.returncode, told.decode()


@pytest.mark.parametrize("script", ["ask_http.py", "ask_grpc.py"])
async def test_a_release_that_serves_passes(calm: Pair, script: str) -> None:
    code, told = await ask(script, HTTP=calm.gateway.url, GRPC=calm.gateway.grpc_target)
    assert code == 0, told
    assert "text" in told or "content" in told


@pytest.mark.parametrize("script", ["ask_http.py", "ask_grpc.py"])
async def test_a_release_that_does_not_answer_fails(script: str) -> None:
    code, told = await ask(script, HTTP="http://127.0.0.1:1", GRPC="127.0.0.1:1")
    assert code not in (0, None) and "Traceback" in told
