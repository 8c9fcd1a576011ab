"""Execute step plans asynchronously on a device: one copy to the device starts a step, one copy back ends it.

Two steps may be in flight. A slice that is chained to the previous step takes its input token from that step's samples
on the device, so that the next step is planned before the token is known. `TorchExecutor` is the reference: hidden rows
and samples agree with it up to the order of sums.

Memory ordering: a step's writes may be read after `collect`, which waits for the event behind the step's last write, so
blocks that are announced to other workers are complete. A block into which a transport copies KV of another worker is
used in a plan only after the host has seen the copy complete. Kernels launched after that see the data on any stream,
because a kernel sees all writes that ended before its launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, SeqId
from tandem.kv.handoff import BlockDigest
from tandem.runtime.device_stream import DeviceStream, StreamMark
from tandem.runtime.executor import BaseExecutor
from tandem.runtime.kv_cache import KVCache, unsigned
from tandem.runtime.models.causal import CausalModel
from tandem.runtime.sampler import LogitRows
from tandem.runtime.sampling_plan import SamplingPlan
from tandem.runtime.slice_work import FAILURES, NO_TOKEN, PreparedSlice, blocks_to_digest, failed, partly_filled
from tandem.runtime.staging import Staged, Staging
from tandem.sched.state.step_plan import ScheduledSlice, SliceResult, StepPlan, StepResult
from tandem_kernels.contract import SamplingRows

if TYPE_CHECKING:
    from tandem.runtime.grammar_engine import LlguidanceMasks

PLAN_DEPTH = 2
"""Largest number of plans that are launched and not yet collected."""

Sample = Callable[[torch.Tensor, SamplingRows], torch.Tensor]
"""Type of the sampling kernel, see `sample` in `tandem_kernels.contract`."""


@dataclass(frozen=True, slots=True)
class _PendingOutput:
    """Outputs of slices that run on the device; host tensors are valid after `mark`.

    `slices`, `sampling_plan`: what was launched. `places`: digested blocks with their indices in their prompts.
    `scores`: prompt log probabilities. `tokens` `[P]`: the sampled tokens on the device. `words` `[P + n * G]`: on the
    host, the same tokens, -1 where a row was not finite, then the digests of `places`. `logits` `[rows, vocab]`: on the
    host, the rows that the host samples from."""

    slices: Sequence[PreparedSlice]
    sampling_plan: SamplingPlan
    places: Sequence[tuple[BlockId, int]]
    scores: dict[SeqId, tuple[SampledToken, ...]]
    tokens: torch.Tensor
    words: torch.Tensor
    logits: torch.Tensor | None
    mark: StreamMark


@dataclass(slots=True)
class _Step:
    """A launched plan: `part` is its pending work on the device, `results` and `digests` are known already. `copied`
    lies after the copies of a plan that computes nothing."""

    plan: StepPlan
    part: _PendingOutput | None = None
    copied: StreamMark | None = None
    results: dict[SeqId, SliceResult] = field(default_factory=dict)
    digests: tuple[BlockDigest, ...] = ()


class AsyncExecutor(BaseExecutor):
    """Executor that computes step plans on a device and may have `PLAN_DEPTH` of them in flight at the same time.

    A step plan lists the tokens to compute in one forward pass, one slice for each sequence. Implements
    `engine.ports.Executor`, where `execute` runs one plan to its end, and `Pipeline`, where `launch` starts a plan and
    `collect` returns the results in launch order. `model`, `cache` and `stream` must be on one device; `sample` is the
    kernel that samples tokens there. `max_model_len` and `grammars`: see `BaseExecutor`."""

    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        sample: Sample,
        stream: DeviceStream,
        max_model_len: int,
        grammars: LlguidanceMasks | None = None,
    ) -> None:
        super().__init__(model, cache, max_model_len, grammars)
        self._sample = sample
        self._stream = stream
        self._open: deque[_Step] = deque()
        with stream.running():
            self._staging = Staging(stream, cache.layout.block_size)

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step plan to its end and return the results of its slices, in the plan's order.

        Raises ValueError while another plan is in flight, and the exceptions of `launch` and `collect`."""
        if self._open:
            raise ValueError(f"{self._open[0].plan} was not collected")
        self.launch(plan)
        return self.collect()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Start one step plan on the device without waiting for it; `collect` returns its result.

        Raises ValueError when `PLAN_DEPTH` plans are in flight, and DeviceLost when the device fails. Before any other
        exception is raised, the device has finished what was started of the plan, so that the plan's blocks can be
        reused. A slice that cannot be computed raises nothing: its result holds the error."""
        if len(self._open) == PLAN_DEPTH:
            raise ValueError(f"{PLAN_DEPTH} plans are in flight")
        with self._stream.running():
            step = _Step(plan)
            try:
                self.cache.copy(plan.spills, plan.fills, plan.copies)
                self._begin(step, self._prepare(plan, step.results))
                if step.part is None:
                    step.copied = self._stream.mark()
            except Exception:
                self._stream.mark().wait()
                raise
        self._open.append(step)

    def collect(self) -> StepResult:
        """Wait for the oldest step plan that was launched and not collected, and return its result.

        Raises DeviceLost when the device fails, and IndexError when no plan is in flight."""
        step = self._open.popleft()
        if step.part is not None:
            results, step.digests = self._finish(step.part)
            step.results.update(results)
        elif step.copied is not None:
            # The blocks and the host memory of its copies are used anew once it is collected.
            step.copied.wait()
        ordered = tuple(self._unbroken(piece, step.results[piece.seq]) for piece in step.plan.slices)
        self._logits_processor.retain(self._last.remember(ordered))
        return StepResult(step.plan.number, ordered, step.digests)

    # ---- launch

    def _chained(self, piece: ScheduledSlice) -> PreparedSlice | str:
        """Return a chained slice with its input token, or with the sample of the step in flight that yields it."""
        for step in self._open:
            result = step.results.get(piece.seq)
            if result is not None and (result.tokens or result.error is not None):
                return PreparedSlice(piece, (result.tokens[-1].id,)) if result.error is None else NO_TOKEN
            if step.part is not None and piece.seq in step.part.sampling_plan.first:
                sample = step.part.sampling_plan.single.get(piece.seq)
                if sample is None:
                    return "the token to continue from is sampled on the host"
                return PreparedSlice(piece, (0,), sample)
        return super()._chained(piece)

    def _begin(self, step: _Step, slices: Sequence[PreparedSlice]) -> None:
        """Start all slices and digests of a step together; if that fails, run them one by one, each to its end."""
        digests = step.plan.digests
        try:
            if slices or digests:
                step.part = self._start(slices, digests)
            return
        except FAILURES as failure:
            # Waits until the launched work has ended and its staging memory is free; raises DeviceLost if it cannot.
            self._stream.mark().wait()
            if len(slices) == 1 and not digests:
                step.results[slices[0].piece.seq] = failed(slices[0].piece.seq, failure)
                return
        if digests:
            step.digests = self._finish(self._start((), digests))[1]
        for prepared in slices:
            step.results.update(self._run_alone(prepared))

    def _run_alone(self, prepared: PreparedSlice) -> dict[SeqId, SliceResult]:
        try:
            return self._finish(self._start([prepared], ()))[0]
        except FAILURES as error:
            self._stream.mark().wait()
            return {prepared.piece.seq: failed(prepared.piece.seq, error)}

    def _start(self, slices: Sequence[PreparedSlice], digests: Sequence[tuple[BlockId, int]]) -> _PendingOutput:
        """Launch slices, their digests, and the `digests` that the plan requests beside them."""
        places = [*digests, *(place for prepared in slices for place in blocks_to_digest(prepared.piece))]
        staged = self._staging.stage(slices, places)
        tokens, logits, scores = staged.picks, None, {}
        if slices:
            hidden = self._forward(slices, staged)
            scores = self._score(slices, hidden)
            if len(staged.sampled_rows):
                tokens, logits = self._sample_tokens(staged, hidden)
        words = tokens
        if places:
            found = self.cache.digest_on_device(staged.digest_blocks, staged.digest_indices)
            words = torch.cat((tokens, found.flatten()))
        words = self._stream.to_host(words)
        return _PendingOutput(slices, staged.sampling_plan, places, scores, tokens, words, logits, self._stream.mark())

    def _forward(self, slices: Sequence[PreparedSlice], staged: Staged) -> torch.Tensor:
        """Launch the forward pass and return hidden rows `[T, hidden]`."""
        assert staged.batch is not None, "there are slices"
        block_size = self.layout.block_size
        self.cache.clear([block for prepared in slices for block in partly_filled(prepared.piece, block_size)])
        if len(staged.chained_rows):
            part = self._open[-1].part
            assert part is not None, "a chained slice has a previous step"
            # A row that was not finite yields -1: its sequence has failed, which the host learns at `collect`.
            ids = part.tokens.index_select(0, staged.chained_samples).clamp_(min=0)
            staged.batch.tokens.index_copy_(0, staged.chained_rows, ids)
        return self.model.forward(staged.batch, self.cache)

    def _sample_tokens(self, staged: Staged, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample on the device, and start the copy of the logits that the host samples from, None if there are none."""
        num_rows, plan = len(staged.sampled_rows), staged.sampling_plan
        # Sampled rows are ascending and unique, so an equal count means all rows.
        logits = self.model.logits(hidden if num_rows == len(hidden) else hidden.index_select(0, staged.sampled_rows))
        device_logits = logits if plan.picks == list(range(num_rows)) else logits.index_select(0, staged.picks)
        tokens = self._sample(device_logits, staged.sampling) if plan.picks else staged.picks.clone()
        if not plan.host_rows:
            return tokens, None
        return tokens, self._stream.to_host(logits.index_select(0, staged.host_rows))

    # ---- collect

    @torch.inference_mode()
    def _finish(self, part: _PendingOutput) -> tuple[dict[SeqId, SliceResult], tuple[BlockDigest, ...]]:
        """Wait for a part and return the results of its slices, and the digests that the plan requested."""
        part.mark.wait()
        num_sampled = len(part.sampling_plan.picks)
        sampled: list[int] = part.words[:num_sampled].tolist()
        heads = unsigned(part.words[num_sampled:].view(len(part.places), -1)) if part.places else []
        digests = [BlockDigest(block, words) for (block, _), words in zip(part.places, heads, strict=True)]
        num_plan_digests = len(digests) - sum(len(prepared.piece.digest_blocks) for prepared in part.slices)
        logits = None if part.logits is None else LogitRows(part.logits)
        results: dict[SeqId, SliceResult] = {}
        next_digest = num_plan_digests
        for prepared in part.slices:
            piece = prepared.piece
            slice_digests = tuple(digests[next_digest : next_digest + len(piece.digest_blocks)])
            next_digest += len(slice_digests)
            scores = part.scores.get(piece.seq, ())
            first = part.sampling_plan.first.get(piece.seq, 0)
            if piece.sampling is None or piece.seq in part.sampling_plan.on_host:
                results[piece.seq] = self._sample_on_host(prepared, logits, first, slice_digests, scores)
            else:
                results[piece.seq] = _device_result(prepared, sampled[first:], slice_digests, scores)
        return results, tuple(digests[:num_plan_digests])

    def _unbroken(self, piece: ScheduledSlice, result: SliceResult) -> SliceResult:
        """Return the result, or an error if the slice was chained to a failed one."""
        is_broken = piece.chained and result.error is None and self._last.get(piece.seq) is None
        return SliceResult(piece.seq, error=NO_TOKEN) if is_broken else result


def _device_result(
    prepared: PreparedSlice, sampled: Sequence[int], digests: tuple[BlockDigest, ...], scores: tuple[SampledToken, ...]
) -> SliceResult:
    """Return the result of a slice that was sampled on the device.

    `sampled` begins with the tokens of this slice. Draft tokens are verified: the output ends with the first sampled
    token that differs from its draft token."""
    piece, sampling = prepared.piece, prepared.piece.sampling
    assert sampling is not None, "the slice samples"
    tokens: list[SampledToken] = []
    drafted = prepared.tokens[piece.num_certain :]
    for index in range(sampling.num_choices if not drafted else 1 + len(drafted)):
        if sampled[index] < 0:
            return failed(piece.seq, ValueError("the model computed logits that are not finite"))
        tokens.append(SampledToken(sampled[index]))
        if index < len(drafted) and sampled[index] != drafted[index]:
            break
    return SliceResult(piece.seq, tuple(tokens), digests, scores=scores)
