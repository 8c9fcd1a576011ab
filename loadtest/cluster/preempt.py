"""Measure how long a question waits at a cluster full of batch answers, and what these lose when they yield to it.

    python -m loadtest preempt [--modes recompute,park,migrate] [--rounds 10] [any flag of `tandem serve`]

A gateway, a prefill worker and decode workers run as processes without Ray. In each round batch answers fill all seats
of the decode workers; later an interactive question arrives, for which one or more of them yield. Every answer must
have the tokens of the same request alone. The question is also sent while nothing else runs. A preempted answer goes on
in one of these modes:

- recompute: one decode worker without a prefix cache; all that was computed is computed again.
- park: one decode worker whose KV memory the batch answers need, so that the question takes blocks of the preempted
  ones; host memory keeps these.
- migrate: two decode workers and `gateway.rebalance=on`; half of the batch answers end soon after the question has
  arrived, so that the worker that decodes them has room for answers that wait at the other one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import aiohttp
import msgspec

from loadtest.client.client import Refused
from loadtest.client.sent_completion import SentCompletion, random_body
from loadtest.common.stats import percentile
from loadtest.common.tables import ms, table
from loadtest.processes.tandem_server import running_gateway
from loadtest.processes.workers import MeasurementError
from tandem.core.config import ModelConfig
from tandem.core.errors import TandemError

NUM_DECODE_WORKERS = {"recompute": 1, "park": 1, "migrate": 2}
"""Decode workers by the mode in which preempted answers go on."""
FLAGS = {
    "recompute": ("--no-enable-prefix-caching",),
    "park": ("--host-cache-memory", "256MiB"),
    "migrate": ("--rebalance", "on"),
}
NUM_WARM = 100
"""Tokens of each batch answer when the question arrives."""
NUM_QUESTION_OUTPUT = 64
"""Tokens of the answer to the question, so that preempted answers wait long enough to go elsewhere."""
PATIENCE_S = 300.0
POLL_S = 0.02


class Round(NamedTuple):
    """Results of one round, in seconds.

    - `idle_ttft_s`, `full_ttft_s`: from the question to its first token, which the prefill worker samples.
    - `idle_gap_s`, `full_gap_s`: from there to its second token, for which the decode worker needs a seat and the KV.
    - `step_s`: the median time between two tokens of the batch answers before the question.
    - `pauses_s`: of each answer that was preempted, in all.
    - `num_moved`: answers that went on at another worker. `num_parked`: blocks in host memory after the round.
    """

    idle_ttft_s: float
    full_ttft_s: float
    idle_gap_s: float
    full_gap_s: float
    step_s: float
    num_preemptions: int
    pauses_s: tuple[float, ...]
    num_moved: int
    num_parked: int


def main(argv: Sequence[str] | None = None) -> int:
    args, flags = _parser().parse_known_args(argv)
    found: dict[str, list[Round]] = {}
    problem: BaseException | None = None
    try:
        for mode in args.modes.split(","):
            asyncio.run(_measure(mode, args, flags, found.setdefault(mode, [])))
    except (KeyboardInterrupt, MeasurementError, Refused, TandemError, TimeoutError, aiohttp.ClientError) as error:
        problem = error
        sys.stderr.write(f"loadtest.cluster.preempt: {error!r}; this is what was measured until then\n")
    sys.stdout.write(report(found))
    return 0 if problem is None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadtest preempt", description="Measure preemption by a question.")
    parser.add_argument("--model", default=ModelConfig().id, help="as for tandem serve (default: %(default)s)")
    parser.add_argument("--modes", default=",".join(FLAGS), help="in which answers go on (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of each mode (default: %(default)s)")
    parser.add_argument("--seats", type=int, default=4, help="of each decode worker (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each batch prompt (default: %(default)s)")
    parser.add_argument("--outputs", type=int, default=320, help="tokens of a batch answer (default: %(default)s)")
    parser.add_argument("--question", type=int, default=192, help="tokens of the question (default: %(default)s)")
    parser.add_argument(
        "--park-memory", default="56MiB", help="of KV on each worker for park, for the default model (%(default)s)"
    )
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="of each worker")
    return parser


async def _measure(mode: str, args: argparse.Namespace, flags: Sequence[str], found: list[Round]) -> None:
    """Add the rounds of one mode to `found`. Raises MeasurementError where an answer differs, and where no answer went
    on in this mode."""
    memory = ("--kv-cache-memory", args.park_memory) if mode == "park" else ()
    own = ("--model", args.model, "--max-num-seqs", str(args.seats), *memory, *FLAGS[mode])
    pools = ["prefill", *("decode",) * NUM_DECODE_WORKERS[mode]]
    async with AsyncExitStack() as stack:
        threads = dict.fromkeys(pools, args.threads)
        gateway = await stack.enter_async_context(running_gateway(pools, threads, 0, [*own, *flags]))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        cluster = FullCluster(mode, args, session, await gateway.url())
        await cluster.warm_up()
        for number in range(args.rounds):
            found.append(await cluster.round())
            sys.stderr.write(f"{mode} {number + 1}/{args.rounds}: {found[-1]}\n")
    if not sum(one.num_preemptions for one in found):
        raise MeasurementError(f"{mode}: nothing was preempted: more --outputs or a longer --question")
    if mode != "recompute" and not sum(one.num_parked if mode == "park" else one.num_moved for one in found):
        raise MeasurementError(f"{mode}: no answer went on in this mode: other --outputs or --park-memory")


class _Targets(msgspec.Struct):
    targets: list[str]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_MODELS = msgspec.json.Decoder(_Models)
_TARGETS = msgspec.json.Decoder(list[_Targets])


class FullCluster:
    """Send the requests of the rounds to a gateway at `url`."""

    def __init__(self, mode: str, args: argparse.Namespace, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._num_decode = NUM_DECODE_WORKERS[mode]
        self._num_salts = 0
        self._question = random_body(args.question, 0, NUM_QUESTION_OUTPUT)
        short = (NUM_WARM + args.outputs) // 2 if mode == "migrate" else args.outputs
        self._batch = [
            random_body(args.tokens, number, short if number % 2 else args.outputs)
            for number in range(1, 1 + args.seats * self._num_decode)
        ]
        self._expected: list[list[int]] = []
        self._model = ""

    async def warm_up(self) -> None:
        """Wait until a request uses a prefill and a decode worker, and record the tokens of each request alone."""
        async with asyncio.timeout(PATIENCE_S):
            is_live = f'tandem_live_workers{{pool="decode"}} {self._num_decode}.0'
            while is_live not in await self._text("/metrics"):  # noqa: ASYNC110 # another process sets no event
                await asyncio.sleep(POLL_S)
            self._model = _MODELS.decode(await self._text("/v1/models")).data[0].id
            while (await self._alone(self._question)).facts.path != "remote":  # noqa: ASYNC110 # as above
                await asyncio.sleep(POLL_S)
        self._expected = [(await self._alone(body)).answer.tokens for body in (self._question, *self._batch)]

    async def round(self) -> Round:
        """Raises MeasurementError where an answer differs from that of the same request alone."""
        idle = await self._alone(self._question)
        salt = self._new_salt()
        batch = [self._open(body, salt, "batch") for body in self._batch]
        async with asyncio.timeout(PATIENCE_S):
            while min(len(stream.answer.tokens) for stream in batch) < NUM_WARM:  # noqa: ASYNC110 # as above
                await asyncio.sleep(0.001)
        steps_s = [gap for stream in batch for gap in _gaps(stream)[-NUM_WARM // 2 :]]
        if any(stream.task.done() for stream in batch):
            raise MeasurementError("a batch answer ended before the question: more --outputs")
        question = self._open(self._question, salt, "interactive")
        await asyncio.gather(question.task, *(stream.task for stream in batch))
        for stream, tokens in zip((question, *batch), self._expected, strict=True):
            if stream.answer.tokens != tokens:
                raise MeasurementError(f"the tokens of {stream.trace} differ from those of the same request alone")
        facts = [stream.facts for stream in batch]
        return Round(
            idle.ttft_s,
            question.ttft_s,
            _gaps(idle)[0],
            _gaps(question)[0],
            statistics.median(steps_s),
            sum(fact.preemptions for fact in facts),
            tuple(fact.paused_ms / 1e3 for fact in facts if fact.preemptions),
            sum("retries=" in fact.path for fact in facts),
            await self._num_parked(),
        )

    async def _alone(self, body: Mapping[str, Any]) -> SentCompletion:
        stream = self._open(body, self._new_salt(), "interactive")
        await stream.task
        return stream

    def _open(self, body: Mapping[str, Any], salt: str, lane: str) -> SentCompletion:
        return SentCompletion(
            self._session,
            f"{self._url}/v1/completions",
            {**body, "model": self._model, "cache_salt": salt},
            {"x-tandem-lane": lane},
        )

    def _new_salt(self) -> str:
        # With a salt of its own no round finds the blocks of another.
        self._num_salts += 1
        return f"round {self._num_salts}"

    async def _num_parked(self) -> int:
        groups = _TARGETS.decode(await self._text("/metrics/targets"))
        pages = [await self._text("/metrics", f"http://{target}") for group in groups for target in group.targets]
        lines = [line for page in pages for line in page.splitlines()]
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(_HOST_BLOCKS))

    async def _text(self, path: str, url: str = "") -> str:
        async with self._session.get(f"{url or self._url}{path}") as response:
            return await response.text()


_HOST_BLOCKS = 'tandem_kv_blocks{state="host"'


def _gaps(stream: SentCompletion) -> list[float]:
    return [later - earlier for earlier, later in pairwise(stream.answer.stamps_s)]


def report(found: Mapping[str, Sequence[Round]]) -> str:
    """Return a table with one row for each mode."""
    heads = [
        "preempted answers",
        "rounds",
        "TTFT idle p50 / p90",
        "TTFT full p50 / p90",
        "second token idle p50 / p90",
        "second token full p50 / p90",
        "decode step",
        "TTFT later by, steps",
        "preemptions",
        "pause p50 / longest",
        "went on elsewhere",
        "parked blocks",
    ]
    rows = []
    for mode, rounds in found.items():
        if not rounds:
            continue
        idle, full = [one.idle_ttft_s for one in rounds], [one.full_ttft_s for one in rounds]
        gaps = [one.idle_gap_s for one in rounds], [one.full_gap_s for one in rounds]
        step_s = statistics.median(one.step_s for one in rounds)
        pauses = [pause for one in rounds for pause in one.pauses_s] or [0.0]
        rows.append(
            [
                mode,
                str(len(rounds)),
                *(f"{ms(percentile(side, 0.5))} / {ms(percentile(side, 0.9))}" for side in (idle, full, *gaps)),
                ms(step_s),
                f"{(statistics.median(full) - statistics.median(idle)) / step_s:.1f}",
                str(sum(one.num_preemptions for one in rounds)),
                f"{ms(statistics.median(pauses))} / {ms(max(pauses))}",
                str(sum(one.num_moved for one in rounds)),
                str(max(one.num_parked for one in rounds)),
            ]
        )
    return table(heads, rows)


if __name__ == "__main__":
    sys.exit(main())
