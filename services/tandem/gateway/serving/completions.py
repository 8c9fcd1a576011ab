"""From a parsed body to the parts of its answer, the same way for both fronts; never reads or writes a protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, cast

import msgspec

from tandem.admission.tenant import Tenant
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import PromptLogprobs
from tandem.core.request import Request
from tandem.gateway.context.interfaces import RequestDispatcher, ServedModel
from tandem.gateway.context.rate_limit_status import RateLimitStatus
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.openai.output_spec import OutputSpec, OutputSpecFactory, with_grammar
from tandem.gateway.openai.prompt import Prompt, checked_tokens, encode, given_prompts
from tandem.gateway.openai.request_params import (
    GenerationParams,
    asked_lane,
    chat_ask,
    chat_ending,
    completion_ask,
    conversation,
    new_id,
    request,
)
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tandem.gateway.output.output_parser import parse_stream
from tandem.gateway.output.response_format import GrammarCheck
from tandem.gateway.output.text_stream import ChoiceEnd, ChoiceTextStream, Delta
from tandem.gateway.output.tools import make_tool_set
from tandem.gateway.serving.echo import Echo, PromptScores, ScoredPrompt, echo_deltas
from tandem.gateway.serving.merge import merge_streams
from tandem.gateway.telemetry.request_recorder import RequestKind, RequestRecorder, RequestRecording, RequestTiming
from tandem.gateway.telemetry.token_timing import GATHERED
from tandem.gateway.telemetry.usage import Usage, UsageCounter
from tandem.gateway.text.detokenizer import Detokenizer

T = TypeVar("T")
Part = ScoredPrompt | Echo | Delta | ChoiceEnd
"""What comes of each prompt: its scores if they were asked for, the echo of each choice likewise, then the deltas of
all choices as they come, and one Ending for each choice."""

_INLINE_CHARS = 2000
"""Text up to this length is tokenized at once: about a millisecond, less than what a thread costs under load."""
_MAX_ENCODING = 16 << 20
"""Characters: some three seconds of two threads. Longer, and a client does better elsewhere."""
_MESSAGE_CHARS = 20
"""Of what a chat template writes around each message."""


class CompletionStream:
    """An async context over what answers one body; leaving it ends what still runs. Its `jobs`, one for each prompt,
    have been admitted. The i-th choice of the p-th prompt is choice p * ask.num_choices + i."""

    __slots__ = (
        "_completions",
        "_is_curious",
        "_output_spec",
        "_prompts",
        "_recording",
        "_tally",
        "ask",
        "jobs",
        "served",
    )

    def __init__(
        self,
        ask: GenerationParams,
        served: ServedModel,
        output_spec: OutputSpec,
        prompts: Sequence[Prompt],
        recording: RequestRecording,
    ) -> None:
        self.ask = ask
        self.served = served
        self.jobs: list[Request] = []
        self._output_spec = output_spec
        self._prompts = prompts
        self._completions: list[ChoiceTextStream] = []
        self._recording = recording
        self._is_curious = False
        self._tally = UsageCounter(ask.num_choices, recording.pace)

    async def admit(self, dispatch: RequestDispatcher, jobs: Sequence[Request], caller: RequestContext) -> None:
        """All jobs or none: when one is refused, those before it end."""
        self._is_curious = caller.wants_explanation
        if not caller.session and self.ask.body.user:
            caller = replace(caller, session=self.ask.body.user)
        job, recording = jobs[0], self._recording
        try:
            dispatch.check_feasible(jobs, caller)
            for job in jobs:
                stream = await dispatch.open(job, caller, recording.ledger(job.sampling.max_tokens))
                recording.admitted(job, stream)
                self.jobs.append(job)
                self._completions.append(
                    ChoiceTextStream(job, stream, self._detokenizer, show_stop_tokens=self.ask.include_stop)
                )
                self._tally.admitted(len(job.prompt_tokens))
        except BaseException as error:
            if isinstance(error, TandemError):
                recording.refused(job, error)
            await self.__aexit__(type(error), error, error.__traceback__)
            raise

    @property
    def id(self) -> str:
        return self._recording.id

    @property
    def model(self) -> str:
        """As the client called it."""
        return self.ask.body.model

    @property
    def num_choices(self) -> int:
        return len(self._prompts) * self.ask.num_choices

    def usage(self) -> Usage:
        """Up to the last part that came; too dear to be asked for with every token."""
        return self._tally.usage()

    @property
    def path(self) -> str:
        """As `TokenStream.path`; of several prompts, those that are known, joined by commas."""
        return ", ".join(dict.fromkeys(completion.path for completion in self._completions if completion.path))

    @property
    def num_attempts(self) -> int:
        """Of several prompts, of the one that took most."""
        return max(completion.num_attempts for completion in self._completions)

    @property
    def reasons(self) -> list[dict[str, object]] | None:
        """Of each prompt, for JSON, final as the path is; None: nobody asked."""
        return [dict(each.reasons) for each in self._completions] if self._is_curious else None

    @property
    def timing(self) -> RequestTiming | None:
        """Where its time went up to now; None: nobody asked."""
        return self._recording.timing

    @property
    def has_more(self) -> bool:
        """Another part is likely to come without a wait. Of several prompts nobody knows."""
        return len(self._completions) == 1 and self._completions[0].has_more

    @property
    def standing(self) -> RateLimitStatus:
        """After all jobs were admitted."""
        return self._completions[-1].standing

    async def __aenter__(self) -> CompletionStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recording.end(error, self._tally, is_complete=len(self._tally.reasons) == self.num_choices)
        if len(self._completions) == 1:
            await self._completions[0].close()
        else:
            # A gathering that is cancelled still waits for all, and none of these closes can be interrupted.
            await asyncio.gather(*(completion.close() for completion in self._completions))

    def parts(self) -> AsyncGenerator[Part, None]:
        """To be closed by `aclose`."""
        sources = [self._parts_of(index) for index in range(len(self._completions))]
        return sources[0] if len(sources) == 1 else merge_streams(sources)

    async def _parts_of(self, prompt: int) -> AsyncGenerator[Part, None]:
        job, choices = self.jobs[prompt], prompt * self.ask.num_choices
        scores = PromptScores(job.prompt_tokens)
        num_echoed: int | None = None
        pace, ended = self._recording.pace, self._tally.ended
        left, now, times, last = pace.on_token_sent, pace.now, None, 0
        # Asynchronous generators have aclose, which AsyncIterator, the better promise, does not show.
        events = cast(AsyncGenerator[Delta | PromptLogprobs | ChoiceEnd, None], self._completions[prompt].events())
        speeches = [self._output_spec.parser(job.prompt_tokens) for _ in range(self.ask.num_choices)]
        events = parse_stream(events, [speech for speech in speeches if speech is not None]) if speeches[0] else events
        async with aclosing(events):
            async for event in events:
                if isinstance(event, PromptLogprobs):
                    scores.take(event)
                    continue
                if num_echoed is None:
                    num_echoed = 0
                    for told in self._of_the_prompt(prompt, scores):
                        num_echoed = told.num_chars if isinstance(told, Echo) else 0
                        yield told
                part = _with_choice_offset(event, choices, num_echoed) if choices or num_echoed else event
                if isinstance(part, ChoiceEnd):
                    ended(part)
                elif part.token is not None:
                    if times is None or part.choice != last or len(times) >= GATHERED:
                        last, times = part.choice, left(part.choice)
                    else:
                        times.append(now())
                yield part

    def _of_the_prompt(self, prompt: int, scores: PromptScores) -> Iterator[ScoredPrompt | Echo]:
        ask = self.ask
        tokens = () if ask.prompt_scores is None else scores.complete()
        if ask.body.prompt_logprobs is not None:
            yield ScoredPrompt(prompt, tokens)
        if ask.echo:
            shown = tokens if ask.logprobs is not None else ()
            deltas = echo_deltas(
                self._prompts[prompt],
                self.served.text,
                shown,
                ask.logprobs or 0,
                skip_special_tokens=ask.skip_special_tokens,
            )
            first = prompt * ask.num_choices
            yield from (Echo(deltas, choice) for choice in range(first, first + ask.num_choices))

    def _detokenizer(self) -> Detokenizer:
        ask = self.ask
        return self.served.text.detokenizer(
            ask.stops,
            skip_special_tokens=ask.skip_special_tokens,
            include_stop=ask.include_stop,
            min_tokens=ask.body.min_tokens or 0,
            shown=self._output_spec.shown,
        )


def _num_chars(message: Mapping[str, Any]) -> int:
    """About as many as a chat template makes of it."""
    said = len(message["content"]) + len(message.get("reasoning_content", ""))
    return _MESSAGE_CHARS + said + _written(message.get("tool_calls"))


def _written(value: Any) -> int:
    """Bytes as JSON."""
    return len(msgspec.json.encode(value)) if value else 0


def _with_choice_offset(part: Delta | ChoiceEnd, choices: int, num_chars: int) -> Delta | ChoiceEnd:
    choice = part.choice + choices
    if isinstance(part, ChoiceEnd):
        return replace(part, choice=choice)
    return part._replace(choice=choice, offset=part.offset + num_chars)


class CompletionService:
    """`encoders` tokenizes long prompts and compiles grammars, so that none of them stops everybody's streams."""

    __slots__ = ("_dispatch", "_encoders", "_grammars", "_num_encoding", "_output_specs", "_recorder", "now")

    def __init__(
        self,
        dispatch: RequestDispatcher,
        encoders: Executor,
        recorder: RequestRecorder,
        output_specs: OutputSpecFactory,
    ) -> None:
        self._dispatch = dispatch
        self._encoders = encoders
        self._num_encoding = 0  # characters that wait for it or are under way
        self._recorder = recorder
        self.now = recorder.clock.now
        self._output_specs = output_specs
        self._grammars = GrammarCheck()

    def models(self, tenant: Tenant) -> list[ServedModel]:
        """Those that it may use."""
        return [model for model in self._dispatch.models() if tenant.may_use(*model.names)]

    def find(self, name: str, tenant: Tenant) -> ServedModel:
        """The model that clients call so. Raises MODEL_NOT_FOUND, or NO_WORKER while none is served."""
        for model in self.models(tenant):
            if name in model.names:
                return model
        if not self._dispatch.models():
            reason = self._dispatch.ready() or "no model is served yet"
            raise TandemError(ErrorKind.NO_WORKER, reason, retry_after_s=1.0)
        raise TandemError(ErrorKind.MODEL_NOT_FOUND, f"the model {name!r} does not exist", param="model")

    async def chat(self, body: ChatBody, caller: RequestContext) -> CompletionStream:
        """Admit a chat completion. Raises TandemError when it is refused."""
        asked = RequestKind("chat", asked_lane(body, caller), bool(body.stream))
        with self._recorder.admission(new_id("chatcmpl-"), asked, caller) as recording:
            served = self.find(body.model, caller.tenant)
            recording.set_model(served.name)
            ask = chat_ask(body)
            output_spec = self._output_specs.of_chat(body, served.text)
            prompt = Prompt(await self._encode_chat(served, body, output_spec))
            return await self._open(ask, served, output_spec, [prompt], caller, recording)

    async def complete(self, body: CompletionBody, caller: RequestContext) -> CompletionStream:
        """Admit a plain completion of one or several prompts. Raises TandemError when one of them is refused."""
        asked = RequestKind("completion", asked_lane(body, caller), bool(body.stream))
        with self._recorder.admission(new_id("cmpl-"), asked, caller) as recording:
            served = self.find(body.model, caller.tenant)
            recording.set_model(served.name)
            ask = completion_ask(body)
            output_spec = self._output_specs.of_completion(body, served.text)
            given = given_prompts(body.prompt, served.text.vocab_size, ask.num_choices)
            add_special_tokens = body.add_special_tokens is not False

            def encode_all() -> list[Prompt]:
                return [
                    encode(each, served.text, add_special_tokens=add_special_tokens, with_places=ask.echo)
                    for each in given
                ]

            prompts = await self._encode(encode_all, sum(len(each) for each in given if isinstance(each, str)))
            return await self._open(ask, served, output_spec, prompts, caller, recording)

    async def tokenize(self, body: TokenizeBody, tenant: Tenant) -> tuple[ServedModel, tuple[int, ...]]:
        """The token ids that a completion of this prompt, or a chat of these messages, would begin with."""
        served = self._named_or_only(body.model, tenant)
        if (body.prompt is None) == (body.messages is None):
            raise TandemError(ErrorKind.INVALID_REQUEST, "either prompt or messages must be given", param="prompt")
        if body.prompt is None:
            output_spec = OutputSpec(text=served.text, tools=make_tool_set(body.tools, body.tool_choice, None))
            return served, await self._encode_chat(served, body, output_spec)
        prompt, add = body.prompt, body.add_special_tokens is not False
        found = await self._encode(lambda: served.text.encode_text(prompt, add_special_tokens=add), len(prompt))
        return served, found

    async def detokenize(self, body: DetokenizeBody, tenant: Tenant) -> str:
        served = self._named_or_only(body.model, tenant)
        tokens = checked_tokens(body.tokens, served.text.vocab_size, "tokens")
        return await self._encode(lambda: served.text.decode(tokens), len(tokens))

    def _named_or_only(self, name: str | None, tenant: Tenant) -> ServedModel:
        models = self.models(tenant)
        if name is None and len(models) > 1:
            message = "model must be given, because several are served"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="model")
        return self.find(models[0].name if name is None and models else name or "", tenant)

    async def _encode_chat(
        self, served: ServedModel, body: ChatBody | TokenizeBody, output_spec: OutputSpec
    ) -> tuple[int, ...]:
        given = body.messages or []
        messages, tools = output_spec.conversation(conversation(given))
        ending = chat_ending(given, body.add_generation_prompt, body.continue_final_message)

        def encode_chat() -> tuple[int, ...]:
            return served.text.encode_chat(
                messages,
                body.chat_template_kwargs,
                tools=tools,
                ending=ending,
                add_special_tokens=bool(body.add_special_tokens),
            )

        num_chars = sum(map(_num_chars, messages)) + _written(tools) + _written(body.chat_template_kwargs)
        return await self._encode(encode_chat, num_chars)

    async def token_strings(self, served: ServedModel, tokens: Sequence[int]) -> list[str]:
        """The texts of single tokens."""
        return await self._encode(lambda: served.text.token_strings(tokens), len(tokens))

    async def _encode(self, work: Callable[[], T], num_chars: int) -> T:
        if num_chars <= _INLINE_CHARS:
            return work()
        if self._num_encoding and self._num_encoding + num_chars > _MAX_ENCODING:
            message = "more text waits for its tokenization than a moment's worth"
            raise TandemError(ErrorKind.OVERLOADED, message, retry_after_s=1.0, reason="tokenization")
        self._num_encoding += num_chars
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoders, work)
        finally:
            self._num_encoding -= num_chars

    async def _shaped(self, job: Request, output_spec: OutputSpec) -> Request:
        """The request with its grammar. Raises INVALID_REQUEST for one that does not compile."""
        grammar, parts = output_spec.grammar(job.prompt_tokens)
        for part in parts:
            if not self._grammars.knows(part.grammar):
                await asyncio.get_running_loop().run_in_executor(self._encoders, self._grammars.check, part)
        return with_grammar(job, grammar, output_spec.text)

    async def _open(
        self,
        ask: GenerationParams,
        served: ServedModel,
        output_spec: OutputSpec,
        prompts: Sequence[Prompt],
        caller: RequestContext,
        recording: RequestRecording,
    ) -> CompletionStream:
        identity = recording.id
        names = [identity] if len(prompts) == 1 else [f"{identity}-{index}" for index in range(len(prompts))]
        traceparent = recording.trace.traceparent
        jobs = [
            request(ask, served, prompt.ids, name, caller, traceparent)
            for prompt, name in zip(prompts, names, strict=True)
        ]
        if not output_spec.is_plain:
            jobs = [await self._shaped(job, output_spec) for job in jobs]
        answer = CompletionStream(ask, served, output_spec, prompts, recording)
        await answer.admit(self._dispatch, jobs, caller)
        return answer
