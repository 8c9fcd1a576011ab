"""Measure what one tenant's attack on the gateway costs another tenant.

    python -m loadtest neighbour [--attack digits|schemas] [--seconds 60] [--json FILE] [any flag of `tandem serve`]

One prefill and one decode worker serve a model that costs next to nothing, with the tokenizer of `--model`, behind one
gateway. The victim's requests run for `--seconds` alone, and for as long while the attacker repeats its own. The exit
status is 1 where a bound of `Bounds` is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from loadtest.common.model import model_directory
from loadtest.common.tables import ms, table
from loadtest.common.tiny_model import make_tiny_with_text_of
from loadtest.gateway.neighbour_attack import ATTACKS, Attack
from loadtest.gateway.neighbour_load import Memory, Period, Victim, sampled
from loadtest.processes.tandem_server import RunningGateway, running_gateway
from loadtest.processes.workers import MeasurementError
from tandem.admission.api_keys import KEY_BYTES, hash_text, key_digest, key_text

MAX_MODEL_LEN = 32_768
START_S = 120.0
REST_S = 10.0
"""Seconds from the attack's last answer to the last look at the gateway's memory."""
MIB = 1 << 20


class Bounds(msgspec.Struct, frozen=True):
    """Limit what the victim may notice of an attack, and the gateway's memory."""

    ratio: float = 1.5
    """Of the p99 of each kind of request to the same p99 without the attack."""
    gap_s: float = 0.1
    """By which the longest gap of a stream may grow."""
    health_s: float = 0.1
    """Longest answer of /health."""
    peak_bytes: int = 400 * MIB
    kept_bytes: int = 50 * MIB
    """By which the memory may be larger than before, `REST_S` after the attack."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """`num_attacks`: requests of the attacker by the status of their answer. Memory is that of the gateway and its
    child processes."""

    attack: str
    alone: Period
    attacked: Period
    num_attacks: dict[int, int]
    before_bytes: int
    peak_bytes: int
    after_bytes: int


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="loadtest neighbour", description="Cost of one tenant's attack for another.")
    parser.add_argument("--attack", choices=sorted(ATTACKS), default="digits")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each period (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer is used")
    parser.add_argument("--json", type=Path)
    args, flags = parser.parse_known_args(argv)
    try:
        result = asyncio.run(_measure(args.attack, args.seconds, args.model, flags))
    except MeasurementError as error:
        sys.stderr.write(f"loadtest neighbour: {error}\n")
        return 1
    if args.json is not None:
        args.json.write_bytes(msgspec.json.encode(result))
    sys.stdout.write(report(result))
    return 1 if misses(result, Bounds()) else 0


async def _measure(attack: str, seconds: float, model: str, flags: Sequence[str]) -> Result:
    victim, attacker = (key_text(secrets.token_bytes(KEY_BYTES)) for _ in range(2))
    with tempfile.TemporaryDirectory(prefix="tandem-neighbour-") as path:
        folder = Path(path)
        tiny = make_tiny_with_text_of(folder / "tiny", model_directory(model), MAX_MODEL_LEN)
        keys = {"victim": victim, "attacker": attacker}
        tenants = {name: {"keys": [{"hash": hash_text(key_digest(key))}]} for name, key in keys.items()}
        (folder / "tenants.yaml").write_text(json.dumps({"tenants": tenants}))
        own = ["--log-level", "error", "--model", str(tiny)]
        own += ["--auth", "keys", "--tenants", str(folder / "tenants.yaml")]
        async with _gateway([*own, *flags]) as (pid, url):
            return await measure(attack, seconds, url, pid, victim, attacker)


@asynccontextmanager
async def _gateway(flags: Sequence[str]) -> AsyncIterator[tuple[int, str]]:
    """Run a small cluster, and yield the process id and the URL of its gateway once it serves."""
    async with running_gateway(("prefill", "decode"), {"prefill": 1, "decode": 1}, 0, flags) as gateway:
        try:
            url = await asyncio.wait_for(_url_once_ready(gateway), START_S)
        except TimeoutError:
            raise MeasurementError(f"the gateway was not ready within {START_S:g} s") from None
        yield gateway.process.pid, url


async def _url_once_ready(gateway: RunningGateway) -> str:
    url = await gateway.url()
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/ready") as response:
                if response.status == 200:
                    return url
            await asyncio.sleep(0.2)


async def measure(attack: str, seconds: float, url: str, pid: int, victim: str, attacker: str) -> Result:
    """Measure one attack on the gateway at `url`, whose process is `pid`; `victim` and `attacker` are keys."""
    async with Victim(url, victim) as load:
        await load.warm_up()
        alone = await load.run(seconds)
        async with sampled(pid) as memory:
            before_bytes = memory.last_bytes
            async with Attack(url, attacker, ATTACKS[attack]).running() as attacking:
                attacked = await load.run(seconds)
            await asyncio.sleep(REST_S)
            return Result(
                attack=attack,
                alone=alone,
                attacked=attacked,
                num_attacks=dict(sorted(attacking.num_answers.items())),
                before_bytes=before_bytes,
                peak_bytes=memory.peak_bytes,
                after_bytes=Memory(pid).bytes(),
            )


def misses(result: Result, bounds: Bounds) -> list[str]:
    """Return a sentence for each bound that the result misses."""
    alone, attacked = result.alone, result.attacked
    found = [
        f"{count} requests of the victim failed: {attacked.errors[0]}" for count in [len(attacked.errors)] if count
    ]
    for kind in alone.p99_s.keys() & attacked.p99_s.keys():
        ratio = attacked.p99_s[kind] / alone.p99_s[kind]
        if ratio > bounds.ratio:
            found.append(
                f"{kind}: p99 is {ratio:.2f} times that without the attack, at most {bounds.ratio:g} is allowed"
            )
    found += [f"{kind}: no request ended" for kind in alone.p99_s.keys() - attacked.p99_s.keys()]
    if attacked.gap_s > alone.gap_s + bounds.gap_s:
        found.append(f"a stream paused {ms(attacked.gap_s)} ms, {ms(alone.gap_s)} ms without the attack")
    if attacked.health_s > bounds.health_s:
        found.append(f"/health answered after {ms(attacked.health_s)} ms, at most {ms(bounds.health_s)} are allowed")
    if result.peak_bytes > bounds.peak_bytes:
        found.append(f"the gateway took {result.peak_bytes / MIB:.0f} MiB")
    if result.after_bytes > result.before_bytes + bounds.kept_bytes:
        found.append(f"the gateway kept {(result.after_bytes - result.before_bytes) / MIB:.0f} MiB")
    return sorted(found)


def report(result: Result) -> str:
    """Return the result as Markdown, with the bounds that it misses."""
    alone, attacked = result.alone, result.attacked
    rows = []
    for kind, p99_s in alone.p99_s.items():
        hit = attacked.p99_s.get(kind)
        ratio = "-" if hit is None else f"{hit / p99_s:.2f}"
        cells = [f"{ms(period.p50_s[kind])} / {ms(period.p99_s[kind])}" if kind in period.p99_s else "-"
                 for period in (alone, attacked)]  # fmt: skip
        rows.append((f"{kind}, p50 / p99 ms", *cells, ratio))
    for name, calm, hit in (
        ("longest gap of a stream, ms", alone.gap_s, attacked.gap_s),
        ("longest answer of /health, ms", alone.health_s, attacked.health_s),
    ):
        rows.append((name, ms(calm), ms(hit), f"{hit / calm:.2f}"))
    counts = {
        kind: (alone.num_requests.get(kind, 0), attacked.num_requests.get(kind, 0)) for kind in alone.num_requests
    }
    sizes = (result.before_bytes, result.peak_bytes, result.after_bytes)
    missed = misses(result, Bounds())
    return "\n".join(
        [
            table((f"attack {result.attack}", "alone", "under attack", "ratio"), rows),
            f"Requests: {', '.join(f'{kind} {a} and {b}' for kind, (a, b) in counts.items())}.",
            f"Answers to the attacker by status: {result.num_attacks}.",
            "Memory of the gateway before, at most and after: {:.0f}, {:.0f}, {:.0f} MiB.".format(
                *(size / MIB for size in sizes)
            ),
            *(f"Missed: {miss}." for miss in missed),
            "",
        ]
    )
