"""Measure TTFT of alternating conversations on our engine, with and without host memory and files for evicted KV.

    python -m loadtest.engine.chats [--chats 6] [--turns 4] [--rounds 2] [--directory DIR]

The pool holds a third of the KV of all conversations, host memory a third or all of it, and files all of it. The last
row has the last turns at an engine that has only the files of the one before. Nothing else runs meanwhile, so TTFT is
the time of the prompt's computation, the copies and the reads; files are written between the turns.
"""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.common.stats import percentile
from loadtest.common.tables import ms, table
from tandem.core.clock import Clock, SystemClock
from tandem.core.config import Bytes, Config, EngineConfig
from tandem.core.events import Finished, JobEvent, Token
from tandem.core.ids import RequestId
from tandem.core.request import GenerateJob, Request, SamplingParams
from tandem.engine.effects import Effect, ReadFiles, WriteFiles
from tandem.engine.engine import TICK_S
from tandem.engine.factory import build_engine, engine_limits
from tandem.runtime.model_loader import load_model
from tandem.worker.engine.calibrate import calibrate
from tandem.worker.engine.driver import Command
from tandem.worker.kv.block_files import BlockFiles
from tandem.worker.kv.file_cache import FileCache
from tandem.workload.seeded_random import tokens

_PROMPT, _OUTPUT = 160, 16
_SEED = 1
_TIERS = ("device only", "+ host for a third", "+ host for all", "+ host for a third + files", "the same, restarted")


@dataclass(frozen=True, slots=True)
class _Turn:
    ttft_s: float
    num_cached: int
    num_prompt: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.engine.chats")
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4, help="of each conversation (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="how often all tiers are measured (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where the files are (default: a temporary directory)")
    args = parser.parse_args(argv)
    rows = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            for tiers in _TIERS:
                turns = list(_measure(args.chats, args.turns, tiers, Path(directory)))
                later = turns[-args.chats :] if tiers == _TIERS[-1] else turns[args.chats :]
                share = sum(turn.num_cached for turn in later) / sum(turn.num_prompt for turn in later)
                shown = [ms(percentile([turn.ttft_s for turn in later], p)) for p in (0.5, 0.99)]
                rows.append([tiers, *shown, f"{share:.0%}"])
    head = ["KV of three thirds", "TTFT of later turns, p50 ms", "p99 ms", "cached share of their prompts"]
    sys.stdout.write(table(head, rows) + "\n")
    return 0


def _measure(num_chats: int, num_turns: int, tiers: str, directory: Path) -> Iterator[_Turn]:
    """Yield the turns of all conversations; of a restarted engine only the last ones."""
    clock, config = SystemClock(), Config()
    engine_config = EngineConfig(max_num_batched_tokens=512)
    all_bytes = num_chats * num_turns * (_PROMPT + _OUTPUT) * _token_bytes(config, engine_config)
    host_thirds = {_TIERS[0]: 0, _TIERS[2]: 3}.get(tiers, 1)
    has_files = tiers in _TIERS[3:]
    config = replace(
        config,
        engine=replace(
            engine_config,
            kv_cache_memory=Bytes(all_bytes // 3),
            host_cache_memory=Bytes(all_bytes * host_thirds // 3),
            file_cache_path=str(directory) if has_files else "",
        ),
    )
    with ExitStack() as stack:
        node = _Node(config, clock, stack)
        histories: list[list[int]] = [[] for _ in range(num_chats)]
        for turn in range(num_turns):
            for i, history in enumerate(histories):
                history += tokens(_PROMPT, _SEED, "chat", i, turn)
                if tiers == _TIERS[-1] and turn < num_turns - 1:
                    history += tokens(_OUTPUT, _SEED, "answer", i, turn)
                    continue
                seen = node.run_turn(f"{i}.{turn}", history)
                history += tokens(_OUTPUT, _SEED, "answer", i, turn)
                yield seen


class _Node:
    """An engine with its executor, and the files if the settings name a directory."""

    def __init__(self, config: Config, clock: Clock, stack: ExitStack) -> None:
        model = load_model(config.model, config.engine)
        self._executor, self._clock = model.executor, clock
        self._engine = build_engine(config, model.executor, model.fingerprint.digest, model.executor.max_model_len)
        cost = calibrate(model.executor, clock, engine_limits(config, model.executor.max_model_len))
        if cost is not None:
            self._engine.pacer.model.restart(cost)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._files: FileCache | None = None
        if config.engine.file_cache_path:
            layout = model.executor.layout
            files = BlockFiles(
                Path(config.engine.file_cache_path),
                layout.block_bytes,
                layout.group.heads,
                config.engine.file_cache_size,
            )
            self._engine.files_changed(*files.scan())
            self._files = FileCache(files, model.executor.cache, self._inbox.put, clock)
            self._files.start()
            stack.callback(self._files.stop, 10.0)

    def run_turn(self, name: str, prompt: Sequence[int]) -> _Turn:
        """Run one request, and then wait until its blocks are written."""
        sampling = SamplingParams(max_tokens=_OUTPUT, temperature=0.0)
        request = Request(id=RequestId(name), model="m", prompt_tokens=tuple(prompt), sampling=sampling)
        began, first_at, num_cached = self._clock.now(), 0.0, 0
        effects = self._engine.submit(GenerateJob(request=request, attempt=1), began)
        while True:
            for event in self._carry_out(effects):
                if isinstance(event, Token):
                    first_at = first_at or self._clock.now()
                elif isinstance(event, Finished):
                    num_cached = event.num_cached_tokens
            if self._engine.is_idle and not self._engine.is_using_files:
                return _Turn(first_at - began, num_cached, len(prompt))
            effects = self._step()

    def _step(self) -> list[Effect]:
        """Run one step, or wait for what the files report where there is nothing to compute."""
        plan, effects = self._engine.begin(self._clock.now())
        if plan is not None:
            effects += self._engine.finish(self._executor.execute(plan), self._clock.now())
        with suppress(queue.Empty):
            command = self._inbox.get(timeout=0.0 if plan is not None else TICK_S)
            effects += command(self._engine, self._clock.now())
        return effects + self._engine.tick(self._clock.now())

    def _carry_out(self, effects: Sequence[Effect]) -> Iterator[JobEvent]:
        for effect in effects:
            if isinstance(effect, ReadFiles | WriteFiles):
                assert self._files is not None
                self._files.submit(effect)
            elif isinstance(effect, JobEvent):
                yield effect


def _token_bytes(config: Config, engine: EngineConfig) -> int:
    return load_model(config.model, replace(engine, kv_cache_memory=Bytes(64 << 20))).executor.layout.token_bytes


if __name__ == "__main__":
    sys.exit(main())
