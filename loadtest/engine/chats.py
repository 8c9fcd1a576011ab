"""Measure TTFT of alternating conversations on our engine, with and without host memory for evicted KV blocks.

    python -m loadtest.engine.chats [--chats 6] [--turns 4] [--rounds 2]

The pool holds a third of the KV of all conversations, host memory all of it. Nothing else runs meanwhile, so TTFT is
the time of the prompt's computation and the copies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from loadtest.common.stats import percentile
from loadtest.common.tables import ms, table
from tandem.core.clock import Clock, SystemClock
from tandem.core.config import Bytes, Config, EngineConfig
from tandem.core.events import Finished, JobEvent, Token
from tandem.core.ids import RequestId
from tandem.core.request import GenerateJob, Request, SamplingParams
from tandem.engine.effects import Effect
from tandem.engine.engine import Engine
from tandem.engine.factory import build_engine
from tandem.engine.ports import Executor
from tandem.runtime.model_loader import load_model
from tandem.workload.seeded_random import tokens

_PROMPT, _OUTPUT = 160, 16
_SEED = 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.engine.chats")
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4, help="of each conversation (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="how often both ways are measured (default: %(default)s)")
    args = parser.parse_args(argv)
    num_tokens = args.chats * args.turns * (_PROMPT + _OUTPUT)
    rows = []
    for _ in range(args.rounds):
        for has_host in (False, True):
            turns = list(_measure(args.chats, args.turns, num_tokens, has_host))
            ttfts, later = [t for t, _, _ in turns], turns[args.chats :]
            share = sum(cached for _, cached, _ in later) / sum(prompt for _, _, prompt in later)
            shown = [ms(percentile(ttfts[args.chats :], p)) for p in (0.5, 0.95)]
            rows.append(["yes" if has_host else "no", *shown, f"{share:.0%}"])
    head = ["host memory", "TTFT of later turns, p50 ms", "p95 ms", "cached share of their prompts"]
    sys.stdout.write(table(head, rows) + "\n")
    return 0


def _measure(num_chats: int, num_turns: int, num_tokens: int, has_host: bool) -> Iterator[tuple[float, int, int]]:
    """Yield seconds to the first token, cached tokens and prompt tokens of each turn."""
    clock, config = SystemClock(), Config()
    engine_config = EngineConfig(max_num_batched_tokens=512)
    token_bytes = _token_bytes(config, engine_config)
    pool, host = Bytes(num_tokens * token_bytes // 3), Bytes(num_tokens * token_bytes * has_host)
    config = replace(config, engine=replace(engine_config, kv_cache_memory=pool, host_cache_memory=host))
    model = load_model(config.model, config.engine)
    engine = build_engine(config, model.executor, model.fingerprint.digest, model.executor.max_model_len)
    histories: list[list[int]] = [[] for _ in range(num_chats)]
    for turn in range(num_turns):
        for i, history in enumerate(histories):
            history += tokens(_PROMPT, _SEED, "chat", i, turn)
            ttft, cached, answer = _run_turn(engine, model.executor, clock, f"{i}.{turn}", history)
            yield ttft, cached, len(history)
            history += answer


def _token_bytes(config: Config, engine: EngineConfig) -> int:
    return load_model(config.model, replace(engine, kv_cache_memory=Bytes(64 << 20))).executor.layout.token_bytes


def _run_turn(
    engine: Engine, executor: Executor, clock: Clock, name: str, prompt: Sequence[int]
) -> tuple[float, int, list[int]]:
    sampling = SamplingParams(max_tokens=_OUTPUT, temperature=0.0)
    request = Request(id=RequestId(name), model="m", prompt_tokens=tuple(prompt), sampling=sampling)
    began, first_at, answer, cached = clock.now(), 0.0, [], 0
    effects: list[Effect] = engine.submit(GenerateJob(request=request, attempt=1), began)
    while not engine.is_idle:
        plan, effects = engine.begin(clock.now())
        assert plan is not None, "a prompt waits for nothing here"
        effects = [*effects, *engine.finish(executor.execute(plan), clock.now())]
        for event in (effect for effect in effects if isinstance(effect, JobEvent)):
            if isinstance(event, Token):
                first_at = first_at or clock.now()
                answer.append(event.token.id)
            elif isinstance(event, Finished):
                cached = event.num_cached_tokens
    return first_at - began, cached, answer


if __name__ == "__main__":
    sys.exit(main())
