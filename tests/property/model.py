"""A model of a model: KV cells that name the whole prefix they stand for, so any wrong cell is noticed; never fast.

The token after a prefix is a function of the prefix and the seed. A cell holds its position, its token and a number
that stands for all tokens up to it, so that reading a stale, foreign, unwritten or misplaced cell breaks the chain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tandem.core.events import FinishReason, SampledToken
from tandem.core.ids import BlockId, SeqId
from tandem.core.request import Job, SamplingParams
from tandem.kv.handoff import BlockDigest
from tandem.sched.state.step_plan import ScheduledSlice, SliceResult, StepPlan, StepResult

VOCABULARY = 40
STOP_TOKEN = 7
_MASK = (1 << 61) - 1


@dataclass(frozen=True, slots=True)
class Cell:
    """KV of one token. `chain` stands for all tokens up to and including this one."""

    position: int
    token: int
    chain: int


def chain(before: int, position: int, token: int) -> int:
    return hash((before, position, token, 0x51)) & _MASK


def chain_of(tokens: Sequence[int]) -> int:
    value = 0
    for position, token in enumerate(tokens):
        value = chain(value, position, token)
    return value


def sample_token(prefix: int, sampling: SamplingParams, choice: int, index: int) -> int:
    """The token that follows a prefix. `index` takes part, so that a wrong one is noticed."""
    return hash((prefix, sampling.seed, choice, index, 0x77)) % VOCABULARY


def score(prefix: int, token: int) -> SampledToken:
    """Of a token that follows a prefix."""
    return SampledToken(token, -float(hash((prefix, token, 0x99)) % 1000))


def expected_scores(job: Job) -> tuple[SampledToken, ...]:
    """Those of the prompt's tokens from the second on."""
    prompt = job.request.prompt_tokens
    return tuple(score(chain_of(prompt[:i]), prompt[i]) for i in range(1, len(prompt)))


def expected_output(job: Job) -> tuple[tuple[int, ...], FinishReason]:
    """All output tokens of a job's choice, those of earlier attempts included, and why it ends."""
    sampling = job.request.sampling
    tokens = [*job.request.prompt_tokens, *job.output_tokens]
    value = chain_of(tokens)
    output = list(job.output_tokens)
    while sampling.max_tokens:
        token = sample_token(value, sampling, job.choice, len(output))
        value = chain(value, len(tokens), token)
        tokens.append(token)
        output.append(token)
        if token in sampling.stop_token_ids:
            return tuple(output), FinishReason.STOP
        if len(output) >= sampling.max_tokens:
            return tuple(output), FinishReason.LENGTH
    return (), FinishReason.LENGTH


class KVStore:
    """`cells[block][slot]`; None is memory that was never written."""

    def __init__(self, num_blocks: int, block_size: int, num_host_slots: int = 0) -> None:
        self.block_size = block_size
        self.cells: list[list[Cell | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[Cell | None]] = [[None] * block_size for _ in range(num_host_slots)]

    def read(self, blocks: Sequence[BlockId], stop: int) -> int:
        """Check positions `[0, stop)` and return the chain of the last."""
        value = 0
        for position in range(stop):
            cell = self.cells[blocks[position // self.block_size]][position % self.block_size]
            assert cell is not None, f"position {position} of {list(blocks)} was never written"
            assert cell.position == position, f"position {position} of {list(blocks)} holds {cell}"
            value = chain(value, position, cell.token)
            assert cell.chain == value, f"position {position} of {list(blocks)} belongs to another prefix: {cell}"
        return value

    def write(self, blocks: Sequence[BlockId], start: int, tokens: Sequence[int]) -> int:
        """Append to a prefix that is complete up to `start`; returns the chain of the last token."""
        return self._write(blocks, start, tokens, self.read(blocks, start))

    def receive(self, blocks: Sequence[BlockId], start: int, tokens: Sequence[int]) -> None:
        """Write positions `[start, len(tokens))` of the prefix `tokens`, computed by another worker; the cells before
        `start` are not read."""
        self._write(blocks, start, tokens[start:], chain_of(tokens[:start]))

    def _write(self, blocks: Sequence[BlockId], start: int, tokens: Sequence[int], value: int) -> int:
        for position, token in enumerate(tokens, start):
            value = chain(value, position, token)
            cell = Cell(position, token, value)
            self.cells[blocks[position // self.block_size]][position % self.block_size] = cell
        return value

    def spoil(self, blocks: Sequence[BlockId], start: int, stop: int) -> None:
        """What a failed step may leave behind."""
        for position in range(start, stop):
            self.cells[blocks[position // self.block_size]][position % self.block_size] = None

    def digest(self, block: BlockId) -> tuple[int, ...]:
        return (hash(tuple((c.position, c.token, c.chain) if c else 0 for c in self.cells[block])) & _MASK,)


class ModelExecutor:
    """Runs plans in order on a `KVStore`, checking every slice that it is given."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._last_number = -1
        self._last_sampled: dict[SeqId, int] = {}
        self._failed: set[SeqId] = set()

    def execute(self, plan: StepPlan, failing: Collection[SeqId] = ()) -> StepResult:
        """`failing` sequences report an error and leave their slots spoilt, in this plan and in all that follow."""
        self._failed.update(failing)
        assert plan.number > self._last_number, f"{plan} comes after plan {self._last_number}"
        self._last_number = plan.number
        seqs = [s.seq for s in plan.slices]
        assert len(set(seqs)) == len(seqs), f"{plan} names a sequence twice"
        assert len({slot for _, slot in plan.spills}) == len(plan.spills), f"{plan} copies twice to one slot"
        assert len({block for _, block in plan.fills}) == len(plan.fills), f"{plan} copies twice to one block"
        for block, slot in plan.spills:
            self.store.host[slot] = list(self.store.cells[block])
        for slot, block in plan.fills:
            self.store.cells[block] = list(self.store.host[slot])
        for source, target in plan.copies:
            self.store.cells[target] = list(self.store.cells[source])
        digests = tuple(BlockDigest(block, self.store.digest(block)) for block, _ in plan.digests)
        return StepResult(plan.number, tuple(self._run(piece) for piece in plan.slices), digests)

    def _run(self, piece: ScheduledSlice) -> SliceResult:
        size = self.store.block_size
        assert len(set(piece.blocks)) == len(piece.blocks) == -(-piece.stop // size), f"{piece}: blocks"
        if piece.seq in self._failed:
            self.store.spoil(piece.blocks, piece.start, piece.stop)
            return SliceResult(piece.seq, error="injected")
        tokens = (self._last_sampled[piece.seq],) if piece.chained else piece.tokens
        assert len(tokens) == piece.num_tokens > 0, f"{piece}: tokens"
        assert piece.num_certain > 0 <= piece.num_drafted, f"{piece}: guesses"
        value = self.store.write(piece.blocks, piece.start, tokens[: piece.num_certain])
        guesses = tokens[piece.num_certain :]
        self.store.write(piece.blocks, piece.start + piece.num_certain, guesses)
        sampled = self._sample(piece, value, guesses)
        digests = tuple(BlockDigest(b, self.store.digest(b)) for b in piece.digest_blocks)
        return SliceResult(piece.seq, sampled, digests, scores=self._score(piece))

    def _score(self, piece: ScheduledSlice) -> tuple[SampledToken, ...]:
        """Each known token after the cell before it, which this slice has written."""
        assert len(piece.scored) <= piece.num_certain, f"{piece} scores more than it computes"
        prefixes = [self.store.read(piece.blocks, piece.start + 1 + i) for i in range(len(piece.scored))]
        return tuple(score(prefix, token) for prefix, token in zip(prefixes, piece.scored, strict=True))

    def _sample(self, piece: ScheduledSlice, value: int, guesses: Sequence[int]) -> tuple[SampledToken, ...]:
        """One token after the certain ones, and one after each guess for as long as guesses are right."""
        sampling = piece.sampling
        if sampling is None:
            assert not guesses, f"{piece} guesses without a draw"
            return ()
        if sampling.params.needs_history:
            assert chain_of((*sampling.prompt, *sampling.output)) == value, f"{piece}: not what came before"
            assert len(sampling.output) == sampling.index, f"{piece}: index"
        if sampling.num_choices > 1:
            assert not guesses, f"{piece} guesses after a draw of several choices"
            one_each = [sample_token(value, each.params, each.choice, each.index) for each in sampling.per_choice()]
            return tuple(SampledToken(token) for token in one_each)
        sampled = [sample_token(value, sampling.params, sampling.choice, sampling.index)]
        for i, guess in enumerate(guesses, 1):
            if sampled[-1] != guess:
                break
            value = chain(value, piece.start + piece.num_certain + i - 1, guess)
            sampled.append(sample_token(value, sampling.params, sampling.choice, sampling.index + i))
        self._last_sampled[piece.seq] = sampled[-1]
        return tuple(SampledToken(token) for token in sampled)
