"""From a parsed body to the parts of its answer, the same way for both fronts; never reads or writes a protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from types import TracebackType
from typing import cast

from tandem.admission.tenant import Tenant
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.request import Request
from tandem.gateway.caller import Caller
from tandem.gateway.completion import Completion, Part
from tandem.gateway.openai_request import Ask, chat_ask, completion_ask, conversation, request, single_prompt
from tandem.gateway.openai_schema import ChatBody, CompletionBody
from tandem.gateway.ports import Dispatch, ServedModel, Standing

_INLINE_CHARS = 2000
"""Text up to this length is tokenized at once: about a millisecond, less than what a thread costs under load."""


class Answer:
    """An async context over what answers one body; leaving it ends what still runs. `job` has been admitted."""

    __slots__ = ("_completion", "ask", "job", "served")

    def __init__(self, ask: Ask, served: ServedModel, job: Request, completion: Completion) -> None:
        self.ask = ask
        self.served = served
        self.job = job
        self._completion = completion

    @property
    def path(self) -> str:
        """Final once the first part has come."""
        return self._completion.path

    @property
    def standing(self) -> Standing:
        return self._completion.standing

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._completion.close()

    def parts(self) -> AsyncGenerator[Part, None]:
        """The parts of all choices as they come, one Ending for each choice; to be closed by `aclose`."""
        # Asynchronous generators have aclose, which AsyncIterator, the better promise, does not show.
        return cast(AsyncGenerator[Part, None], self._completion.events())


class Answers:
    """`encoders` tokenizes long prompts, so that one of them does not stop everybody's streams."""

    __slots__ = ("_dispatch", "_encoders")

    def __init__(self, dispatch: Dispatch, encoders: Executor) -> None:
        self._dispatch = dispatch
        self._encoders = encoders

    def models(self, tenant: Tenant) -> list[ServedModel]:
        """Those that it may use."""
        return [model for model in self._dispatch.models() if tenant.may_use(model.name)]

    def find(self, name: str, tenant: Tenant) -> ServedModel:
        """The model that clients call so. Raises MODEL_NOT_FOUND, or NO_WORKER while none is served."""
        for model in self.models(tenant):
            if model.name == name:
                return model
        if not self._dispatch.models():
            reason = self._dispatch.ready() or "no model is served yet"
            raise TandemError(ErrorKind.NO_WORKER, reason, retry_after_s=1.0)
        raise TandemError(ErrorKind.MODEL_NOT_FOUND, f"the model {name!r} does not exist", param="model")

    async def chat(self, body: ChatBody, caller: Caller) -> Answer:
        """Admit a chat completion. Raises TandemError when it is refused."""
        served, ask = self.find(body.model, caller.tenant), chat_ask(body)
        messages = conversation(body.messages)

        def encode() -> tuple[int, ...]:
            return served.text.encode_chat(messages, body.chat_template_kwargs)

        prompt = await self._encode(encode, sum(len(message["content"]) for message in messages))
        return await self._open(ask, served, request(ask, served, prompt, "chatcmpl-", caller), caller)

    async def complete(self, body: CompletionBody, caller: Caller) -> Answer:
        """Admit a plain completion. Raises TandemError when it is refused."""
        served, ask = self.find(body.model, caller.tenant), completion_ask(body)
        given = single_prompt(body.prompt, served.text.vocab_size)
        if isinstance(given, str):
            text = given
            prompt = await self._encode(lambda: served.text.encode_text(text), len(text))
        else:
            prompt = given
        return await self._open(ask, served, request(ask, served, prompt, "cmpl-", caller), caller)

    async def _encode(self, encode: Callable[[], tuple[int, ...]], num_chars: int) -> tuple[int, ...]:
        if num_chars <= _INLINE_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._encoders, encode)

    async def _open(self, ask: Ask, served: ServedModel, job: Request, caller: Caller) -> Answer:
        stream = await self._dispatch.open(job, caller)
        return Answer(ask, served, job, Completion(job, stream, lambda: served.text.detokenizer(ask.stops)))
