"""Turn a parsed request body into the parts of its response, the same for the HTTP and the gRPC front end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import msgspec

from tandem.admission.tenant import Tenant
from tandem.core.errors import ErrorKind, TandemError, invalid_request
from tandem.core.events import Finished, LaneYield, Pauses, PromptLogprobs, merged_yields
from tandem.core.request import Request
from tandem.core.request_stages import Wait
from tandem.gateway.context.interfaces import RequestDispatcher, ServedModel, TokenStream
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.openai.output_spec import OutputSpec, OutputSpecFactory, with_grammar
from tandem.gateway.openai.prompt import GivenPrompt, Prompt, checked_tokens, encode, given_prompts, prompt_too_long
from tandem.gateway.openai.request_params import (
    GenerationParams,
    chat_ending,
    chat_params,
    completion_params,
    conversation,
    effective_lane,
    new_id,
    request,
)
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tandem.gateway.output.json_limits import check_depth
from tandem.gateway.output.text_stream import ChoiceEnd, ChoiceText, Delta
from tandem.gateway.output.tools import make_tool_set
from tandem.gateway.serving.echo import Echo, PromptScores, ScoredPrompt, echo_deltas
from tandem.gateway.serving.grammar_check import GrammarCheck
from tandem.gateway.serving.merge import merge_streams
from tandem.gateway.serving.tenant_turns import TenantTurn, TenantTurns
from tandem.gateway.telemetry.request_recorder import RequestKind, RequestRecorder, RequestRecording, RequestTiming
from tandem.gateway.telemetry.usage import Usage, UsageCounter
from tandem.gateway.text.text_model import TextTooLong

T = TypeVar("T")
Part = ScoredPrompt | Echo | Delta | ChoiceEnd
"""Part of a response. For each prompt these are, in this order: its ScoredPrompt and one Echo for each choice, where
they were requested; the deltas of all choices as they arrive, with one ChoiceEnd after the last delta of each
choice."""

_INLINE_CHARS = 2000
"""Characters of text that is tokenized on the event loop: about a millisecond, less than a thread costs under load."""
LARGE_BODY_BYTES = 64 << 10
"""Size of a request body above which it is read and tokenized in its tenant's turn."""
_MAX_LARGE_BYTES, _MAX_LARGE_BYTES_OF_TENANT, _MAX_LARGE_BYTES_WAITING = 16 << 20, 4 << 20, 64 << 20
"""Largest number of bytes of large bodies: of all that are read and tokenized at a time, of those of one tenant among
them, and of those of one tenant that wait. A body takes five times its size in memory until it is tokenized."""
_REFUSED_S = 0.5
"""Seconds for which a large body that was refused still counts as being read, because reading it took up to 0.1 s of a
core for nothing."""
_BATCH_CHARS = 32 << 10
"""Characters of several prompts of one body that are tokenized in one turn."""
NUM_ENCODERS = 2
"""Threads that tokenize. A tenant uses at most all but one of them at a time: each tokenizes 1.6 million characters a
second."""
_MAX_WAITING = 512
"""Largest number of turns of one tenant that wait for a tokenizer thread."""
MAX_TOKENIZED = 64 << 10
"""Largest number of tokens that /tokenize returns and that /detokenize takes, unless the model's context is longer."""
_MAX_SESSION_CHARS = 1024
"""Characters of the field `user` that name a session: the router hashes the name once for each placement that it
considers, and a name of 4 MB takes 10 ms."""
_ECHO_SLICE = 1024
"""Tokens of a prompt whose text is made at a time: about 5 ms of the event loop."""
_MESSAGE_CHARS = 20
"""Estimate of the characters that a chat template writes around each message."""


class Explanation(NamedTuple):
    """Explain what the requests of one body waited for, and which sequences were preempted in favour of them.

    `waits`: for each prompt its waits, one for each stage and cause, in order. `yields`: one entry for each lane that
    had sequences preempted in favour of any of the choices, with their number and what they lost.
    """

    waits: Sequence[Sequence[Wait]]
    yields: Sequence[LaneYield]


class CompletionStream:
    """Run the requests of one body and stream their output. As an asynchronous context manager it cancels the requests
    that still run at its exit, and records the result.

    `id`: id of the response. `model`: the model's name as the client wrote it, which may be an alias. `served`: the
    model. `params`: the checked fields of the body. `jobs`: the admitted requests, one for each prompt. `num_choices`:
    number of choices of all prompts together; the i-th choice of the p-th prompt is choice p * params.num_choices + i.
    `recording`: receives what happens, for metrics and logs.
    """

    def __init__(
        self,
        params: GenerationParams,
        served: ServedModel,
        output_spec: OutputSpec,
        prompts: Sequence[Prompt],
        recording: RequestRecording,
    ) -> None:
        self.id = recording.id
        self.model = params.body.model
        self.num_choices = len(prompts) * params.num_choices
        self.params = params
        self.served = served
        self.jobs: list[Request] = []
        self._output_spec = output_spec
        self._prompts = prompts
        self._streams: list[TokenStream] = []
        self._unclosed: list[TokenStream] = []
        self._recording = recording
        self._explain = False
        self._usage_counter = UsageCounter(params.num_choices, recording.pace)

    async def admit(self, dispatch: RequestDispatcher, jobs: Sequence[Request], caller: RequestContext) -> None:
        """Admit the requests `jobs`, one for each prompt, all or none; `parts` then yields their output. Raises
        TandemError where one is refused, after cancelling those admitted before it."""
        self._explain = caller.explain
        body = self.params.body
        if not caller.session and body.user:
            caller = replace(caller, session=body.user[:_MAX_SESSION_CHARS])
        if caller.disaggregation is None and body.disaggregation is not None:
            caller = replace(caller, disaggregation=body.disaggregation)
        recording = self._recording
        try:
            dispatch.check_feasible(jobs, caller)
            for job in jobs:
                stream = await dispatch.open(job, caller, recording.ledger(job.sampling.max_tokens))
                recording.admitted(job, stream)
                self.jobs.append(job)
                self._streams.append(stream)
                self._unclosed.append(stream)
                self._usage_counter.admitted(len(job.prompt_tokens))
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise

    def usage(self) -> Usage:
        """Return the tokens of the prompts and of the parts yielded so far; too expensive to call for every token."""
        return self._usage_counter.usage()

    @property
    def path(self) -> str:
        """Return where the request runs: `remote`, `local` or `fallback` with a reason, as `TokenStream.path` defines
        them; empty while unknown. The different paths of several prompts are joined by commas."""
        return ", ".join(dict.fromkeys(stream.path for stream in self._streams if stream.path))

    @property
    def num_attempts(self) -> int:
        """Return 1 plus the number of retries on other workers; with several prompts, the maximum over the prompts."""
        return max(stream.num_attempts for stream in self._streams)

    @property
    def pauses(self) -> Pauses:
        """Return how often choices of all prompts were preempted and later resumed until now, and the total seconds
        between these preemptions and resumptions."""
        return Pauses.sum(ledger.pauses for ledger in self._recording.ledgers)

    @property
    def explanation(self) -> Explanation | None:
        """Return what the requests have waited for until now, and which sequences were preempted in favour of them;
        None where the client did not request an explanation."""
        if not self._explain:
            return None
        ledgers = self._recording.ledgers
        yields = merged_yields(each for ledger in ledgers for each in ledger.yields)
        return Explanation([ledger.waits for ledger in ledgers], yields)

    @property
    def reasons(self) -> list[dict[str, object]] | None:
        """Return why the router chose the workers of each prompt, as one object of JSON values per prompt; final once
        the first part was yielded. None where the client did not request an explanation."""
        return [dict(stream.reasons) for stream in self._streams] if self._explain else None

    @property
    def timing(self) -> RequestTiming | None:
        """Return how long each stage of the request has taken until now; None where the client did not request the
        times."""
        return self._recording.timing

    @property
    def has_more(self) -> bool:
        """Return whether the next part can probably be read without waiting; False with several prompts, where this is
        unknown."""
        return len(self._streams) == 1 and self._streams[0].has_more

    @property
    def rate_limits(self) -> Mapping[str, str]:
        """Return the headers `x-ratelimit-*` of the tenant, as of the admission of the last request."""
        return self._streams[-1].rate_limits

    async def __aenter__(self) -> CompletionStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recording.end(
            error, self._usage_counter, is_complete=len(self._usage_counter.reasons) == self.num_choices
        )
        with ExitStack() as closing:  # closes all streams, also where one raises
            for stream in self._unclosed:
                closing.callback(stream.close)
            self._unclosed.clear()

    def parts(self) -> AsyncGenerator[Part, None]:
        """Return a generator of the parts of the response, which ends after the last ChoiceEnd or raises TandemError.
        The caller closes it with `aclose`."""
        sources = [self._parts_of(index) for index in range(len(self._streams))]
        return sources[0] if len(sources) == 1 else merge_streams(sources)

    async def _parts_of(self, prompt: int) -> AsyncGenerator[Part, None]:
        """Yield the parts of one prompt: one Delta per token as soon as the token arrives, and one ChoiceEnd per
        choice. Raises what the stream raises."""
        stream = self._streams[prompt]
        scores = PromptScores(self.jobs[prompt].prompt_tokens)
        num_cached: int | None = None
        choices: list[ChoiceText] = []
        async with aclosing(aiter(stream)) as events:
            async for event in events:
                if isinstance(event, PromptLogprobs):
                    scores.take(event)
                    continue
                if not choices:
                    prompt_parts = await self._prompt_parts(prompt, scores)
                    for prompt_part in prompt_parts:
                        yield prompt_part
                    choices = self._choice_texts(prompt, prompt_parts)
                choice = choices[event.key.choice]
                if not choice.is_open:
                    continue
                if isinstance(event, Finished):
                    last_parts = choice.finish(event)
                else:
                    num_cached = event.num_cached_tokens if num_cached is None else num_cached
                    yield self._sent(choice.push(event.token))
                    if not choice.is_stopped:
                        continue
                    last_parts = choice.stop(num_cached)
                    self._stop(stream, event.key.choice, choices)
                for part in last_parts:
                    yield self._sent(part)
                if not any(choice.is_open for choice in choices):
                    return
        raise TandemError(ErrorKind.INTERNAL, "the stream of tokens ended before all choices had")

    def _sent(self, part: Delta | ChoiceEnd) -> Delta | ChoiceEnd:
        """Record that a part is sent now, and return it."""
        if isinstance(part, ChoiceEnd):
            self._usage_counter.ended(part)
        elif part.token is not None:
            self._recording.pace.on_token_sent(part.choice)
        return part

    def _stop(self, stream: TokenStream, index: int, choices: Sequence[ChoiceText]) -> None:
        """End a choice at its stop string: the workers need not generate more of it."""
        if any(choice.is_open for choice in choices):
            stream.finish(index)
        else:
            self._unclosed.remove(stream)
            stream.close()

    def _choice_texts(self, prompt: int, prompt_parts: Sequence[ScoredPrompt | Echo]) -> list[ChoiceText]:
        params, job = self.params, self.jobs[prompt]
        include_stop = bool(params.body.include_stop_str_in_output)
        return [
            ChoiceText(
                prompt * params.num_choices + index,
                self.served.text.detokenizer(
                    params.stops,
                    skip_special_tokens=params.body.skip_special_tokens is not False,
                    include_stop=include_stop,
                    min_tokens=params.body.min_tokens or 0,
                    shown=self._output_spec.shown,
                ),
                self._output_spec.transforms(job.prompt_tokens),
                hidden=frozenset() if include_stop else job.sampling.stop_token_ids,
                num_echoed=next((part.num_chars for part in prompt_parts if isinstance(part, Echo)), 0),
            )
            for index in range(params.num_choices)
        ]

    async def _prompt_parts(self, prompt: int, scores: PromptScores) -> list[ScoredPrompt | Echo]:
        """Return the parts of the response that precede the output of a prompt's choices. The text of a long prompt is
        made in slices, between which other requests have their turns."""
        params = self.params
        tokens = () if params.prompt_scores is None else scores.complete()
        parts: list[ScoredPrompt | Echo] = []
        if params.body.prompt_logprobs is not None:
            parts.append(ScoredPrompt(prompt, tokens))
        if params.echo:
            pieces = echo_deltas(
                self._prompts[prompt],
                self.served.text,
                tokens if params.logprobs is not None else (),
                params.logprobs or 0,
                skip_special_tokens=params.body.skip_special_tokens is not False,
            )
            deltas: list[Delta] = []
            while len(part := list(islice(pieces, _ECHO_SLICE))) == _ECHO_SLICE:
                deltas += part
                await asyncio.sleep(0)
            echoed = (*deltas, *part)
            first = prompt * params.num_choices
            parts += [Echo(echoed, choice) for choice in range(first, first + params.num_choices)]
        return parts


def _num_chars(message: Mapping[str, Any]) -> int:
    """Estimate the characters of the prompt that a chat template makes of a message."""
    num_texts = sum(len(value) for value in message.values() if isinstance(value, str))
    return _MESSAGE_CHARS + num_texts + _num_json_bytes(message.get("tool_calls"))


def _num_json_bytes(value: Any) -> int:
    """Return the size of a value as JSON, in bytes."""
    return len(msgspec.json.encode(value)) if value else 0


@contextmanager
def _refusing_long_prompts(param: str) -> Iterator[None]:
    """Raise CONTEXT_LENGTH for the field `param` where TextTooLong is raised inside."""
    try:
        yield
    except TextTooLong as error:
        raise prompt_too_long(error.max_tokens, None, param) from None


def _end_turn(loop: asyncio.AbstractEventLoop, turn: TenantTurn, future: Future[Any]) -> None:
    """End a turn whose work has ended in another thread."""
    with suppress(RuntimeError):  # the gateway has stopped, and its loop is closed
        loop.call_soon_threadsafe(turn.end)


def _map(function: Callable[[GivenPrompt], Prompt], prompts: Sequence[GivenPrompt]) -> list[Prompt]:
    return [function(prompt) for prompt in prompts]


class CompletionService:
    """Check, tokenize and run completions for both front ends.

    `encoders`: NUM_ENCODERS threads that tokenize long prompts, which would stall the event loop; tenants take turns.
    `recorder`: makes the metrics and the record of each request. `now`: function that returns the time of the gateway's
    clock. `crowded`: function that counts a call refused because too many are open. `grammars`: checks grammars; the
    owner of this service calls its `stop`."""

    def __init__(
        self,
        dispatch: RequestDispatcher,
        encoders: Executor,
        recorder: RequestRecorder,
        output_specs: OutputSpecFactory,
    ) -> None:
        self._dispatch = dispatch
        self._encoders = encoders
        self._encoding = TenantTurns(
            NUM_ENCODERS,
            per_tenant=NUM_ENCODERS - 1,
            max_waiting=_MAX_WAITING,
            what="too many of your long prompts wait for tokenization at this gateway",
            reason="tokenization",
        )
        self._large_bodies = TenantTurns(
            _MAX_LARGE_BYTES,
            per_tenant=_MAX_LARGE_BYTES_OF_TENANT,
            max_waiting=_MAX_LARGE_BYTES_WAITING,
            what="too many of your large requests wait at this gateway",
            reason="large_bodies",
            refused_s=_REFUSED_S,
        )
        self._recorder = recorder
        self.now = recorder.clock.now
        self.crowded = recorder.measures.crowded
        self._output_specs = output_specs
        self.grammars = GrammarCheck()

    async def begin_large(self, tenant: Tenant, num_bytes: int) -> TenantTurn:
        """Wait until a body of more than LARGE_BODY_BYTES may be read and tokenized, and return its turn, which the
        caller ends once the request is admitted or refused. Raises OVERLOADED where too many large bodies of the tenant
        wait already."""
        try:
            return await self._large_bodies.begin(tenant.id, num_bytes)
        except TandemError as error:
            self._recorder.measures.refused(tenant.lane, tenant.id, error)
            raise

    def models(self, tenant: Tenant) -> list[ServedModel]:
        """Return the served models that a tenant may use."""
        return [model for model in self._dispatch.models() if tenant.may_use(*model.names)]

    def find(self, name: str, tenant: Tenant) -> ServedModel:
        """Return the model with this name or alias. Raises MODEL_NOT_FOUND where there is none that the tenant may use,
        or NO_WORKER while no model is served."""
        for model in self.models(tenant):
            if name in model.names:
                return model
        if not self._dispatch.models():
            reason = f"no model is served yet: {self._dispatch.ready() or 'a worker has just started'}"
            raise TandemError(ErrorKind.NO_WORKER, reason, retry_after_s=1.0)
        message = f"the model {name!r} does not exist or you have no access to it; GET /v1/models lists your models"
        raise TandemError(ErrorKind.MODEL_NOT_FOUND, message, param="model")

    async def chat(self, body: ChatBody, caller: RequestContext) -> CompletionStream:
        """Admit a chat completion and return its stream, without waiting for output. Raises TandemError where it is
        refused."""
        kind = RequestKind("chat", effective_lane(body, caller), bool(body.stream))
        with self._recorder.admission(new_id("chatcmpl-"), kind, caller) as recording:
            served = self.find(body.model, caller.tenant)
            recording.set_model(served.name)
            params = chat_params(body)
            output_spec = self._output_specs.of_chat(body, served.text)
            with _refusing_long_prompts("messages"):
                ids = await self._encode_chat(served, body, output_spec, caller.tenant, served.max_model_len)
            return await self._open(params, served, output_spec, [Prompt(ids)], caller, recording)

    async def complete(self, body: CompletionBody, caller: RequestContext) -> CompletionStream:
        """Admit a plain completion of one or several prompts and return its stream, without waiting for output. Raises
        TandemError where one of the prompts is refused."""
        kind = RequestKind("completion", effective_lane(body, caller), bool(body.stream))
        with self._recorder.admission(new_id("cmpl-"), kind, caller) as recording:
            served = self.find(body.model, caller.tenant)
            recording.set_model(served.name)
            params = completion_params(body)
            output_spec = self._output_specs.of_completion(body, served.text)
            given = given_prompts(body.prompt, served.text.vocab_size, served.max_model_len, params.num_choices)
            encode_one = partial(
                encode,
                model=served.text,
                max_tokens=served.max_model_len,
                add_special_tokens=body.add_special_tokens is not False,
                with_offsets=params.echo,
            )
            with _refusing_long_prompts("prompt"):
                prompts = await self._encode_prompts(given, encode_one, caller.tenant)
            return await self._open(params, served, output_spec, prompts, caller, recording)

    async def tokenize(self, body: TokenizeBody, tenant: Tenant) -> tuple[ServedModel, tuple[int, ...]]:
        """Return the served model, and the token ids of the prompt that a completion or a chat with this body would
        compute.

        Raises INVALID_REQUEST unless the body has either a prompt or messages, and where it names no model although
        several are served; CONTEXT_LENGTH where there are more tokens than MAX_TOKENIZED and more than the model's
        context length. Further errors are those of `find`.
        """
        served = self._named_or_only(body.model, tenant)
        most = max(MAX_TOKENIZED, served.max_model_len)
        if (body.prompt is None) == (body.messages is None):
            raise invalid_request("exactly one of prompt and messages is required", "prompt")
        try:
            if body.prompt is None:
                output_spec = OutputSpec(text=served.text, tools=make_tool_set(body.tools, body.tool_choice, None))
                ids = await self._encode_chat(served, body, output_spec, tenant, most)
            else:
                add = body.add_special_tokens is not False
                work = partial(served.text.encode, body.prompt, add_special_tokens=add, max_tokens=most)
                ids, _ = await self._encode(work, len(body.prompt), tenant)
            if len(ids) > most:
                raise TextTooLong(most)
        except TextTooLong as error:
            param = "messages" if body.prompt is None else "prompt"
            message = f"{error}, which is the most that is returned; split {param}"
            raise TandemError(ErrorKind.CONTEXT_LENGTH, message, param=param) from None
        return served, ids

    async def detokenize(self, body: DetokenizeBody, tenant: Tenant) -> str:
        """Return the text of the body's token ids. Raises INVALID_REQUEST for ids outside the vocabulary, for more ids
        than MAX_TOKENIZED and than the model's context length, and where the body names no model although several are
        served. Further errors are those of `find`."""
        served = self._named_or_only(body.model, tenant)
        most = max(MAX_TOKENIZED, served.max_model_len)
        if len(body.tokens) > most:
            raise invalid_request(f"tokens holds {len(body.tokens)} token ids, at most {most} are allowed", "tokens")
        tokens = checked_tokens(body.tokens, served.text.vocab_size, "tokens")
        return await self._encode(partial(served.text.decode, tokens), len(tokens), tenant)

    def _named_or_only(self, name: str | None, tenant: Tenant) -> ServedModel:
        models = self.models(tenant)
        if name is None and len(models) > 1:
            message = "model is required, because several models are served; GET /v1/models lists them"
            raise invalid_request(message, "model")
        return self.find(models[0].name if name is None and models else name or "", tenant)

    async def _encode_chat(
        self,
        served: ServedModel,
        body: ChatBody | TokenizeBody,
        output_spec: OutputSpec,
        tenant: Tenant,
        max_tokens: int,
    ) -> tuple[int, ...]:
        check_depth(body.chat_template_kwargs, "chat_template_kwargs")
        given = body.messages or []
        messages, tools = output_spec.conversation(conversation(given))
        ending = chat_ending(given, body.add_generation_prompt, body.continue_final_message)

        encode_chat = partial(
            served.text.encode_chat,
            messages,
            body.chat_template_kwargs,
            tools=tools,
            ending=ending,
            add_special_tokens=bool(body.add_special_tokens),
            max_tokens=max_tokens,
        )
        num_chars = sum(map(_num_chars, messages)) + _num_json_bytes(tools) + _num_json_bytes(body.chat_template_kwargs)
        return await self._encode(encode_chat, num_chars, tenant)

    async def token_strings(self, served: ServedModel, tokens: Sequence[int], tenant: Tenant) -> list[str]:
        """Return the text of each single token by the vocabulary of `served`."""
        return await self._encode(partial(served.text.token_strings, tokens), len(tokens), tenant)

    async def _encode_prompts(
        self, given: Sequence[GivenPrompt], encode_one: Callable[[GivenPrompt], Prompt], tenant: Tenant
    ) -> list[Prompt]:
        """Encode the prompts of one body with `encode_one`. Long ones take a turn each, so that other tenants' texts
        wait for one prompt at most and not for all."""
        prompts: list[Prompt] = []
        batch: list[GivenPrompt] = []
        num_chars = 0
        for index, prompt in enumerate(given, start=1):
            batch.append(prompt)
            num_chars += len(prompt) if isinstance(prompt, str) else 0
            if num_chars >= _BATCH_CHARS or index == len(given):
                work = partial(_map, encode_one, batch)
                prompts += await self._encode(work, num_chars, tenant)
                batch, num_chars = [], 0
        return prompts

    async def _encode(self, work: Callable[[], T], num_chars: int, tenant: Tenant) -> T:
        """Return the result of `work`, which encodes or decodes `num_chars` characters, in a thread where they are
        many. Raises what `work` raises, and OVERLOADED where too much of the tenant's work waits."""
        if num_chars <= _INLINE_CHARS:
            return work()
        return await asyncio.wrap_future(self._submit(work, await self._encoding.begin(tenant.id)))

    def _submit(self, work: Callable[[], T], turn: TenantTurn) -> Future[T]:
        """Pass work to a thread, and end its turn with it. A caller that is cancelled does not stop the thread."""
        future = self._encoders.submit(work)
        future.add_done_callback(partial(_end_turn, asyncio.get_running_loop(), turn))
        return future

    async def _with_grammar(self, job: Request, output_spec: OutputSpec, tenant: Tenant) -> Request:
        """Return the request with its grammar. Raises INVALID_REQUEST for a grammar that does not compile."""
        grammar, parts = output_spec.grammar(job.prompt_tokens)
        for part in parts:
            await self.grammars.check(part, tenant.id)
        return with_grammar(job, grammar, output_spec.text)

    async def _open(
        self,
        params: GenerationParams,
        served: ServedModel,
        output_spec: OutputSpec,
        prompts: Sequence[Prompt],
        caller: RequestContext,
        recording: RequestRecording,
    ) -> CompletionStream:
        request_id = recording.id
        names = [request_id] if len(prompts) == 1 else [f"{request_id}-{index}" for index in range(len(prompts))]
        traceparent = recording.trace.traceparent
        jobs = [
            request(params, served, prompt.ids, name, caller, traceparent)
            for prompt, name in zip(prompts, names, strict=True)
        ]
        if output_spec.form is not None:
            form = await self.grammars.in_lark(output_spec.form, caller.tenant.id)
            output_spec = replace(output_spec, form=form)
        jobs = [await self._with_grammar(job, output_spec, caller.tenant) for job in jobs]
        stream = CompletionStream(params, served, output_spec, prompts, recording)
        await stream.admit(self._dispatch, jobs, caller)
        return stream
