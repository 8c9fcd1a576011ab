"""Runs plans on a device that computes by itself: a step is begun with one copy to it and ends with one copy back;
never keeps a sequence, only the last tokens of those just planned.

Two steps may be under way. A slice that is chained to the one before takes its id from what that one drew on the
device, so nobody waits for a token before planning on it. `TorchExecutor` is the meaning; rows and draws agree with it
up to the order of sums.

Who reads what a step has written reads it after `collect`, which waits for the event behind the step's last write: so
whatever is announced to other workers is whole. A block that is read from elsewhere is planned only once its transport
has reported the read done on the host; kernels that are begun after that see it, on whatever stream, because the copies
of the transport have ended by then, and a device reads memory that others wrote as of the beginning of each kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, SeqId
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVLayout
from tandem.runtime.device_stream import DeviceStream, StreamEvent
from tandem.runtime.grammar_masks import GrammarMasks
from tandem.runtime.host_sampling import sample_slice
from tandem.runtime.kv_cache import KVCache, unsigned
from tandem.runtime.logits_processor import LogitsProcessor
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.prompt_logprobs import compute_prompt_logprobs
from tandem.runtime.sampler import LogitRows
from tandem.runtime.sampling_plan import SamplingPlan
from tandem.runtime.slice_work import (
    FAILURES,
    NO_TOKEN,
    LastTokens,
    PreparedSlice,
    SliceLimits,
    digest_places,
    failed,
    partly_filled,
)
from tandem.runtime.staging import Staged, Staging
from tandem.sched.state.step_plan import ScheduledSlice, SliceResult, StepPlan, StepResult
from tandem_kernels.contract import SamplingRows

PLAN_DEPTH = 2
"""Plans that may be launched and not collected."""

Sample = Callable[[torch.Tensor, SamplingRows], torch.Tensor]
"""`contract.sample`."""


@dataclass(frozen=True, slots=True)
class _PendingOutput:
    """Work that the device is at. After `mark`: `words` `[P + n * G]` are the tokens drawn, -1 where a row was not
    finite, and the digests of `places`; `logits` `[rows, vocab]` those that the host draws from. `tokens` `[P]` are the
    same tokens on the device."""

    works: Sequence[PreparedSlice]
    draws: SamplingPlan
    places: Sequence[tuple[BlockId, int]]
    scores: dict[SeqId, tuple[SampledToken, ...]]
    tokens: torch.Tensor
    words: torch.Tensor
    logits: torch.Tensor | None
    mark: StreamEvent


@dataclass(slots=True)
class _Step:
    """A plan that was launched: what the device is at, and results that are there already."""

    plan: StepPlan
    part: _PendingOutput | None = None
    results: dict[SeqId, SliceResult] = field(default_factory=dict)
    digests: tuple[BlockDigest, ...] = ()


class AsyncExecutor:
    """An `engine.ports.Executor` and `Pipeline`; model, cache and `stream` are of one device. `max_model_len` bounds
    positions, in tokens. Without `grammars` a slice that draws by a grammar reports an error."""

    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        sample: Sample,
        stream: DeviceStream,
        max_model_len: int,
        grammars: GrammarMasks | None = None,
    ) -> None:
        self.cache = cache
        self.max_model_len = max_model_len
        self.model = model
        self._sample = sample
        self._stream = stream
        self._adjuster = LogitsProcessor(grammars)
        self._bounds = SliceLimits(model.config.vocab_size, max_model_len, cache.num_blocks, cache.layout.block_size)
        self._last = LastTokens()
        self._open: deque[_Step] = deque()
        with stream.running():
            self._staging = Staging(stream, cache.layout.block_size)

    @property
    def layout(self) -> KVLayout:
        return self.cache.layout

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    @property
    def num_host_slots(self) -> int:
        return self.cache.num_host_slots

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan while no other is under way. Results are in the order of its slices."""
        if self._open:
            raise ValueError(f"{self._open[0].plan} was not collected")
        self.launch(plan)
        return self.collect()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Begin one plan. Raises ValueError when as many as may be are under way, DeviceLost, and whatever else went
        wrong once the device is at nothing any more: the plan's blocks may be given to others."""
        if len(self._open) == PLAN_DEPTH:
            raise ValueError(f"{PLAN_DEPTH} plans are under way")
        with self._stream.running():
            step = _Step(plan)
            try:
                self.cache.offload(plan.spills)
                self.cache.onload(plan.fills)
                self.cache.copy(plan.copies)
                self._begin(step, list(self._ready(step)))
            except Exception:
                self._stream.mark().wait()
                raise
        self._open.append(step)

    def collect(self) -> StepResult:
        """Wait for the oldest plan. Raises DeviceLost."""
        step = self._open.popleft()
        if step.part is not None:
            results, step.digests = self._finish(step.part)
            step.results.update(results)
        ordered = tuple(self._unbroken(piece, step.results[piece.seq]) for piece in step.plan.slices)
        self._adjuster.retain(self._last.remember(ordered))
        return StepResult(step.plan.number, ordered, step.digests)

    @torch.inference_mode()
    def logits(self, piece: ScheduledSlice) -> torch.Tensor:
        """Compute one slice and yield the logits of all its rows, `[num_tokens, vocab]`; for tests and scoring.

        Raises ValueError when the slice cannot be computed.
        """
        problem = self._bounds.check(piece, piece.tokens)
        if problem is not None:
            raise ValueError(problem)
        with self._stream.running():
            hidden = self._forward(
                [PreparedSlice(piece, piece.tokens)], self._staging.stage([PreparedSlice(piece, piece.tokens)], ())
            )
            logits = self._stream.to_host(self.model.logits(hidden).clone())
        self._stream.mark().wait()
        return logits

    # ---- launch

    def _ready(self, step: _Step) -> Iterator[PreparedSlice]:
        """The slices that can be computed; of the others the results are there already."""
        for piece in step.plan.slices:
            source = self._source(piece.seq) if piece.chained else None
            if isinstance(source, str):
                step.results[piece.seq] = SliceResult(piece.seq, error=source)
                continue
            tokens = piece.tokens if source is None else (source.token,)
            problem = self._bounds.check(piece, tokens)
            if problem is None:
                yield PreparedSlice(piece, tokens, None if source is None else source.draw)
            else:
                step.results[piece.seq] = SliceResult(piece.seq, error=problem)

    def _source(self, seq: SeqId) -> _TokenSource | str:
        """Where the id of a chained slice comes from, or why there is none."""
        for step in self._open:
            result = step.results.get(seq)
            if result is not None and (result.tokens or result.error is not None):
                return _TokenSource(result.tokens[-1].id) if result.error is None else NO_TOKEN
            if step.part is not None and seq in step.part.draws.first:
                draw = step.part.draws.single.get(seq)
                return "the token to continue from is the host's to find out" if draw is None else _TokenSource(0, draw)
        last = self._last.of(seq)
        return NO_TOKEN if last is None else _TokenSource(last)

    def _begin(self, step: _Step, works: Sequence[PreparedSlice]) -> None:
        """Start all of a step at once; one by one, each to its end, where that fails."""
        digests = step.plan.digests
        try:
            if works or digests:
                step.part = self._start(works, digests)
            return
        except FAILURES as failure:
            # What was begun has ended, and its staging memory is free; raises DeviceLost where nothing will end.
            self._stream.mark().wait()
            if len(works) == 1 and not digests:
                step.results[works[0].piece.seq] = failed(works[0].piece.seq, failure)
                return
        if digests:
            step.digests = self._finish(self._start((), digests))[1]
        for work in works:
            step.results.update(self._alone(work))

    def _alone(self, work: PreparedSlice) -> dict[SeqId, SliceResult]:
        try:
            return self._finish(self._start([work], ()))[0]
        except FAILURES as error:
            self._stream.mark().wait()
            return {work.piece.seq: failed(work.piece.seq, error)}

    def _start(self, works: Sequence[PreparedSlice], digests: Sequence[tuple[BlockId, int]]) -> _PendingOutput:
        """Begin the slices, and the digests that are asked for beside them."""
        places = [*digests, *(place for work in works for place in digest_places(work.piece))]
        staged = self._staging.stage(works, places)
        tokens, logits, scores = staged.picks, None, {}
        if works:
            hidden = self._forward(works, staged)
            scores = self._score(works, hidden)
            if len(staged.sampled_rows):
                tokens, logits = self._draw(staged, hidden)
        words = tokens
        if places:
            found = self.cache.digest_on_device(staged.digest_blocks, staged.digest_indices)
            words = torch.cat((tokens, found.flatten()))
        words = self._stream.to_host(words)
        return _PendingOutput(works, staged.draws, places, scores, tokens, words, logits, self._stream.mark())

    def _forward(self, works: Sequence[PreparedSlice], staged: Staged) -> torch.Tensor:
        """Hidden rows `[T, hidden]`."""
        assert staged.batch is not None, "there are slices"
        block_size = self.layout.block_size
        self.cache.clear([block for work in works for block in partly_filled(work.piece, block_size)])
        if len(staged.chained_rows):
            part = self._open[-1].part
            assert part is not None, "what is chained has a step before it"
            # A row that was not finite drew -1: its sequence has failed, which the host learns later.
            ids = part.tokens.index_select(0, staged.chained_draws).clamp_(min=0)
            staged.batch.tokens.index_copy_(0, staged.chained_rows, ids)
        return self.model.forward(staged.batch, self.cache)

    def _draw(self, staged: Staged, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tokens that the device draws, and logits for those that it does not, on their way to the host."""
        num_rows, draws = len(staged.sampled_rows), staged.draws
        # They are in order and differ, so as many as there are rows means all of them.
        logits = self.model.logits(hidden if num_rows == len(hidden) else hidden.index_select(0, staged.sampled_rows))
        mine = logits if draws.picks == list(range(num_rows)) else logits.index_select(0, staged.picks)
        tokens = self._sample(mine, staged.sampling) if draws.picks else staged.picks.clone()
        if not draws.host_rows:
            return tokens, None
        return tokens, self._stream.to_host(logits.index_select(0, staged.host_rows))

    def _score(self, works: Sequence[PreparedSlice], hidden: torch.Tensor) -> dict[SeqId, tuple[SampledToken, ...]]:
        """Of the slices that ask for it, for which the host waits; `hidden` are all their rows. Raises ValueError when
        a row is not finite."""
        scores: dict[SeqId, tuple[SampledToken, ...]] = {}
        first = 0
        for piece in (work.piece for work in works):
            if piece.scored:
                rows = hidden[first : first + len(piece.scored)]
                scores[piece.seq] = compute_prompt_logprobs(
                    self._host_logits, rows, piece.scored, piece.num_top, self.vocab_size
                )
            first += piece.num_tokens
        return scores

    def _host_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden).cpu()

    # ---- collect

    @torch.inference_mode()
    def _finish(self, part: _PendingOutput) -> tuple[dict[SeqId, SliceResult], tuple[BlockDigest, ...]]:
        """Results of a part's slices, and its first digests, which are those of the plan."""
        part.mark.wait()
        num_draws = len(part.draws.picks)
        drawn: list[int] = part.words[:num_draws].tolist()
        heads = unsigned(part.words[num_draws:].view(len(part.places), -1)) if part.places else []
        digests = [BlockDigest(block, words) for (block, _), words in zip(part.places, heads, strict=True)]
        num_asked = len(digests) - sum(len(work.piece.digest_blocks) for work in part.works)
        logits = None if part.logits is None else LogitRows(part.logits)
        results: dict[SeqId, SliceResult] = {}
        next_digest = num_asked
        for work in part.works:
            piece = work.piece
            mine = tuple(digests[next_digest : next_digest + len(piece.digest_blocks)])
            next_digest += len(mine)
            scores = part.scores.get(piece.seq, ())
            first = part.draws.first.get(piece.seq, 0)
            if piece.sampling is None or piece.seq in part.draws.on_host:
                results[piece.seq] = sample_slice(work, logits, first, self._adjuster, mine, scores)
            else:
                results[piece.seq] = _drawn(work, drawn[first:], mine, scores)
        return results, tuple(digests[:num_asked])

    def _unbroken(self, piece: ScheduledSlice, result: SliceResult) -> SliceResult:
        """A slice that was chained to one that has failed has failed, whatever it drew."""
        is_broken = piece.chained and result.error is None and self._last.of(piece.seq) is None
        return SliceResult(piece.seq, error=NO_TOKEN) if is_broken else result

    def __repr__(self) -> str:
        return f"DeviceExecutor({self.model.config.model_type} on {self._stream.device}, {self.cache!r})"


@dataclass(frozen=True, slots=True)
class _TokenSource:
    """The id of a chained slice: `token`, or what the step before draws as its `draw`-th."""

    token: int
    draw: int | None = None


def _drawn(
    work: PreparedSlice, drawn: Sequence[int], digests: tuple[BlockDigest, ...], scores: tuple[SampledToken, ...]
) -> SliceResult:
    """The result of a slice whose draws, from its first on, the device has made."""
    piece, sampling = work.piece, work.piece.sampling
    assert sampling is not None, "it draws"
    tokens: list[SampledToken] = []
    guesses = work.tokens[piece.num_certain :]
    for place in range(sampling.num_choices if not guesses else 1 + len(guesses)):
        if drawn[place] < 0:
            return failed(piece.seq, ValueError("logits are not finite"))
        tokens.append(SampledToken(drawn[place]))
        if place < len(guesses) and drawn[place] != guesses[place]:
            break
    return SliceResult(piece.seq, tuple(tokens), digests, scores=scores)
