"""Test Serve replicas that end under load, killed or replaced one by one as in a rollout: every answer equals that of
an undisturbed run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from tests.e2e.serve.load import NUM_CLIENTS, Load
from tests.e2e.serve.served import Served, until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

PATIENCE_S = 120.0
POOLS = ("decode", "prefill")


def wait_replaced(served: Served, pool: str, before: int | None) -> None:
    """Wait until another replica has replaced it, and the gateway knows the new one."""
    until(lambda: served.replica(pool) not in (None, before), PATIENCE_S, lambda: served.output)
    live = f'tandem_live_workers{{pool="{pool}"}} 1'
    until(lambda: live in httpx.get(f"{served.url}/metrics").text, PATIENCE_S)


def redeploy(served: Served, *pools: str) -> None:
    """Let Serve stop each replica in order and then start another."""
    served.wait_output(r"tandem role .*\n")
    words = re.findall(r"tandem role (.*)\n", served.output)[0].split()
    role_options = dict(zip(words[::2], words[1::2], strict=True))
    (address,) = {found for line in served.look().values() for found in re.findall(r"--gcs-address=(\S+)", line)}
    rest = (role_options["--redis-url"], role_options["--namespace"], role_options["--secret-file"])
    command = [sys.executable, "-m", "tests.e2e.serve.redeploy", address, *rest, *pools]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def test_killed_replicas_cost_no_request(served: Served) -> None:
    with Load(served) as load:
        for pool in POOLS:
            victim = served.replica(pool)
            assert victim is not None
            load.wait_answers(NUM_CLIENTS)
            os.kill(victim, signal.SIGKILL)
            load.wait_answers(NUM_CLIENTS)
            wait_replaced(served, pool, victim)
    assert load.problems == []


def test_replicas_that_are_replaced_one_after_the_other_cost_no_request(served: Served) -> None:
    before = {pool: served.replica(pool) for pool in POOLS}
    with Load(served) as load:
        load.wait_answers(NUM_CLIENTS)
        redeploy(served, *POOLS)
        load.wait_answers(NUM_CLIENTS)
    assert load.problems == []
    for pool in POOLS:
        wait_replaced(served, pool, before[pool])
