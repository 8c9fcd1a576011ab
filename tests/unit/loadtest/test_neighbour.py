"""Test the measurement of one tenant's attack on another, against an endpoint that does what the test tells it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
from aiohttp import web

from loadtest.gateway import neighbour
from loadtest.gateway.neighbour import MIB, Bounds, Result, measure, misses, report
from loadtest.gateway.neighbour_attack import ATTACKS
from loadtest.gateway.neighbour_load import Memory, Period, Victim
from tests.unit.loadtest.served import running

CALM = Period(
    p50_s={"plain": 0.01, "30 kB": 0.3, "guided": 0.02},
    p99_s={"plain": 0.02, "30 kB": 0.4, "guided": 0.04},
    num_requests={"plain": 100, "30 kB": 10, "guided": 90},
    gap_s=0.05,
    health_s=0.01,
    errors=[],
)
GOOD = Result(
    attack="digits",
    alone=CALM,
    attacked=CALM,
    num_attacks={400: 20},
    before_bytes=120 * MIB,
    peak_bytes=300 * MIB,
    after_bytes=130 * MIB,
)


def attacked(**changes: object) -> Result:
    return msgspec.structs.replace(GOOD, attacked=msgspec.structs.replace(CALM, **changes))


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (attacked(p99_s={**CALM.p99_s, "guided": 0.061}), "guided"),
        (attacked(p99_s={"plain": 0.02, "guided": 0.04}), "30 kB"),
        (attacked(gap_s=0.16), "paused"),
        (attacked(health_s=0.11), "/health"),
        (attacked(errors=["plain: 503"]), "503"),
        (msgspec.structs.replace(GOOD, peak_bytes=401 * MIB), "took"),
        (msgspec.structs.replace(GOOD, after_bytes=171 * MIB), "kept"),
    ],
)
def test_each_bound_that_is_missed_is_named(result: Result, word: str) -> None:
    assert misses(GOOD, Bounds()) == []
    (miss,) = misses(result, Bounds())
    assert word in miss
    assert miss in report(result) and "Missed" not in report(GOOD)


@dataclass
class Gateway:
    """Answer the victim at once until the attacker's first request; from then on, answer it `slow_s` later."""

    slow_s: float = 0.0
    url: str = ""
    attacked: bool = False
    bodies: list[bytes] = field(default_factory=list)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.headers["authorization"] == "Bearer attacker":
            self.bodies.append(body)
            self.attacked = True
            await asyncio.sleep(0.05)
            return web.Response(status=400)
        await asyncio.sleep(0.005 + (self.slow_s if self.attacked else 0.0))
        if not msgspec.json.decode(body).get("stream"):
            return web.json_response({})
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(3):
            await asyncio.sleep(0.005 + (self.slow_s if self.attacked else 0.0))
            await response.write(b"data: {}\n\n")
        return response


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[Gateway]:
    async with running({"/v1/chat/completions": gateway.complete}) as gateway.url:
        yield gateway


async def test_a_slow_neighbour_shows_in_every_kind_of_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "REST_S", 0.0)
    async with serving(Gateway(slow_s=0.5)) as gateway:
        result = await measure("schemas", 1.0, gateway.url, os.getpid(), "victim", "attacker")
    assert result.attacked.errors == result.alone.errors == []
    for kind in ("plain", "30 kB", "guided"):
        # The first request of a kind may precede the attack, and the percentile lies between two of a few values.
        assert result.attacked.p99_s[kind] > 0.25 and result.alone.num_requests[kind] > 0
    assert result.attacked.gap_s > 0.5
    assert set(result.num_attacks) == {400} and result.peak_bytes >= result.before_bytes > 0


async def test_a_refused_request_is_an_error_of_the_period() -> None:
    async with serving(Gateway()) as gateway, Victim(gateway.url, "attacker") as load:
        period = await load.run(0.1)
    assert {error.partition(":")[0] for error in period.errors} == {"plain", "30 kB", "guided", "stream"}
    assert period.p99_s == {}


def test_no_schema_of_the_attacker_repeats() -> None:
    _, body = ATTACKS["schemas"]
    first, second = (
        msgspec.json.decode(body("m", number))["response_format"]["json_schema"]["schema"] for number in (1, 2)
    )
    assert len(first["properties"]) == 3000 and not first["properties"].keys() & second["properties"].keys()


def test_memory_counts_child_processes() -> None:
    before = Memory(os.getpid()).bytes()
    program = "kept = b'x' * (64 << 20); print(1, flush=True); import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert Memory(os.getpid()).bytes() - before > 48 << 20
