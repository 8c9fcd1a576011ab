"""Replace the dispatcher behind the front end in benchmarks: tokens are yielded at once or step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import cycle, islice
from typing import ClassVar

from loadtest.common.model import model_directory
from tandem.core.bundle import TokenizerBundle
from tandem.core.config import ModelConfig
from tandem.core.errors import TandemError
from tandem.core.events import Finished, FinishReason, PromptLogprobs, SampledToken, Token
from tandem.core.ids import JobKey
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.gateway.context.interfaces import KVBlocks, ServedModel
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.orchestration.active_request import EventQueue
from tandem.gateway.text.text_model import TextModel
from tandem.orchestration.phase_ledger import PhaseLedger
from tandem.routing.worker_view import WorkerView

AT_ONCE, BY_STEP, NEVER = "at-once", "by-step", "never"
"""Names of the models: all tokens at once; one per stream and turn of the loop; only one token ever."""
MAX_MODEL_LEN = 1 << 20
_PROSE = (
    " The river had risen in the night, and by the morning the lower fields were under water. Nobody in the village"
    " remembered a spring like it; the oldest of them spoke of 1924, when the bridge had gone, but that had been June."
)


def bundle() -> TokenizerBundle:
    """Return the tokenizer of Tandem's default model, with a template that adds nothing."""
    source = (model_directory(ModelConfig().id) / "tokenizer.json").read_bytes()
    return TokenizerBundle(
        tokenizer_json=source,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
        generation_config_json="{}",
        special_tokens_json='{"eos_token_ids": [2]}',
    )


def answer_ids(text: TextModel, count: int) -> list[int]:
    """Return `count` token ids of English prose, which is repeated as often as needed."""
    return list(islice(cycle(text.encode(_PROSE).ids), count))


class InstantStream:
    """`TokenStream` of tokens that the benchmark pushes."""

    path = "local"
    rate_limits: ClassVar[Mapping[str, str]] = {}
    reasons: ClassVar[Mapping[str, object]] = {}
    workers: Sequence[str] = ("door",)

    def __init__(self, request: Request, ids: Sequence[int], backend: InstantDispatch) -> None:
        self._request, self._ids, self._backend = request, ids, backend
        self._key, self._next = JobKey(request.id, 1), 0
        self._events = EventQueue()

    def push(self) -> bool:
        """Push one more token; return False with the last one."""
        index, last = self._next, self._request.sampling.max_tokens - 1
        self._next += 1
        self._events.push(Token(self._key, index, SampledToken(self._ids[index % len(self._ids)])))
        if index == last:
            self._events.push(Finished(self._key, FinishReason.LENGTH, last + 1, 0))
        return index < last

    @property
    def num_attempts(self) -> int:
        return 1

    @property
    def has_more(self) -> bool:
        return bool(self._events)

    async def __aiter__(self) -> AsyncGenerator[Token | PromptLogprobs | Finished, None]:
        while True:
            event = await self._events.next()
            if isinstance(event, TandemError):
                raise event
            yield event

    def finish(self, choice: int) -> None:
        raise AssertionError(f"choice {choice} of one")

    def close(self) -> None:
        self._backend.forget(self)


class InstantDispatch:
    """`RequestDispatcher` without workers.

    The model for step-by-step output produces one token per stream and iteration of the event loop, as an engine whose
    steps take no time would.
    """

    def __init__(self) -> None:
        text = TextModel(bundle())
        self._ids = answer_ids(text, 1024)
        self._models = [ServedModel(name, MAX_MODEL_LEN, text, 0) for name in (AT_ONCE, BY_STEP, NEVER)]
        self._stepped: dict[InstantStream, None] = {}
        self._stepping: asyncio.Task[None] | None = None

    def models(self) -> Sequence[ServedModel]:
        return self._models

    def ready(self) -> str | None:
        return None

    def num_queued(self) -> dict[Lane, int]:
        return {}

    def kv_blocks(self) -> KVBlocks | None:
        return None

    def scrape_targets(self) -> list[tuple[str, WorkerView]]:
        return []

    def problem(self) -> str | None:
        return None

    def check_feasible(self, requests: Sequence[Request], caller: RequestContext) -> None:
        pass

    async def open(self, request: Request, caller: RequestContext, ledger: PhaseLedger) -> InstantStream:
        stream = InstantStream(request, self._ids, self)
        if request.model == AT_ONCE:
            while stream.push():
                pass
        elif request.model == NEVER:
            stream.push()
        else:
            self._stepped[stream] = None
            if self._stepping is None:
                self._stepping = asyncio.create_task(self._step())
        return stream

    def forget(self, stream: InstantStream) -> None:
        self._stepped.pop(stream, None)

    async def _step(self) -> None:
        while self._stepped:
            for stream in [stream for stream in self._stepped if not stream.push()]:
                del self._stepped[stream]
            await asyncio.sleep(0)
        self._stepping = None
