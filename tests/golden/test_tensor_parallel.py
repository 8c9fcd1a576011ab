"""Test that several ranks compute what one does: tokens in float64 and logits in float32."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.config import Bytes, EngineConfig, ModelConfig
from tandem.core.errors import TandemError
from tandem.core.ids import BlockId, SeqId
from tandem.engine.rank_messages import Forward, RankCommand, RanksLost
from tandem.kv.host_offload import HostSlot
from tandem.runtime.architectures.spec import ExpertsMlp
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.executor import TorchExecutor
from tandem.runtime.layer_tensors import read_layer
from tandem.runtime.model_config import read_model_config
from tandem.runtime.parallel.shard import Shard, require_divisible
from tandem.runtime.random_weights import open_weights
from tandem.sched.state.step_plan import ScheduledSlice, StepPlan
from tests.golden.conftest import TinyModels
from tests.golden.models import NEAR_TIE, TINY, TINY_DENSE, Reference, make_wide, random_prompts, teacher_forced
from tests.golden.parallel import ranked_executor
from tests.golden.steps import generate
from tests.golden.stored_formats import write_random
from tests.stand_in import stand_in_for_a_gpu

_OUTPUTS = 6
_BLOCKS = 64
_PROMPTS = random_prompts((1, 16, 40))


@pytest.fixture(autouse=True)
def _ranks_take_turns() -> Iterator[None]:
    """Ranks are threads here, each of which waits for the others many times in a step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def ranked(
    reference: Reference, size: int, enable_expert_parallel: bool = False, **options: Any
) -> AbstractContextManager[TorchExecutor]:
    """Return an executor on so many ranks; `options` as `ranked_executor` takes them."""
    whole = reference.executor(kernels="reference", num_blocks=_BLOCKS).layout
    engine = EngineConfig(
        tensor_parallel=size,
        enable_expert_parallel=enable_expert_parallel,
        block_size=whole.block_size,
        kv_cache_memory=Bytes(_BLOCKS * whole.block_bytes // size),
        host_cache_memory=Bytes(2 * whole.block_bytes // size),
        num_threads=1,
    )
    model = ModelConfig(id=str(reference.directory), dtype=reference.dtype, cache_dir=reference.cache_dir)
    return ranked_executor(reference.directory, model, engine, **options)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_wide(tmp_path_factory.mktemp("wide"), "float64")


_NAMES = sorted(name for name in TINY if not name.startswith("olmo"))


@pytest.mark.parametrize(
    ("name", "enable_expert_parallel"),
    [*((name, False) for name in _NAMES), *((name, True) for name in _NAMES if name not in TINY_DENSE)],
)
def test_two_ranks_give_the_tokens_of_the_reference(tiny: TinyModels, name: str, enable_expert_parallel: bool) -> None:
    """With parts of all experts on each rank, and with whole experts."""
    reference = tiny(name, "float64")
    expected = [reference.greedy(prompt, _OUTPUTS) for prompt in _PROMPTS]
    with ranked(reference, 2, enable_expert_parallel) as executor:
        assert generate(executor, _PROMPTS, _OUTPUTS, chunk=7, chained=True, stagger=1) == expected


@pytest.mark.parametrize("enable_expert_parallel", [False, True])
def test_the_first_rank_counts_the_tokens_of_all_experts(tiny: TinyModels, enable_expert_parallel: bool) -> None:
    reference = tiny("qwen3-moe", "float64")
    alone = reference.executor(kernels="reference", num_blocks=_BLOCKS)
    generate(alone, _PROMPTS, _OUTPUTS)
    with ranked(reference, 2, enable_expert_parallel) as executor:
        generate(executor, _PROMPTS, _OUTPUTS, chunk=7, chained=True)
        assert executor.model.expert_tokens() == alone.model.expert_tokens()
    assert all(min(tokens) > 0 for tokens in alone.model.expert_tokens().values())


def test_a_rank_holds_its_own_experts_only(tiny: TinyModels) -> None:
    """The second half of the experts, in as many bytes as halves of all take."""
    reference = tiny("qwen3-moe", "float64")
    spec = read_model_config(reference.directory)
    layer = next(i for i, each in enumerate(spec.layers) if isinstance(each.mlp, ExpertsMlp))
    parts: dict[bool, dict[str, torch.Tensor]] = {}
    for whole in (False, True):
        with open_weights(reference.directory, torch.float64) as checkpoint:
            parts[whole] = dict(read_layer(spec, checkpoint, layer, Shard(1, 2, whole)))
    with open_weights(reference.directory, torch.float64) as checkpoint:
        every = dict(read_layer(spec, checkpoint, layer))
    for name in ("expert_gate_up", "expert_down"):
        assert torch.equal(parts[True][name], every[name][len(every[name]) // 2 :])
        assert parts[True][name].nbytes == parts[False][name].nbytes
    assert torch.equal(parts[True]["qkv"], parts[False]["qkv"])


def test_what_cannot_be_placed_is_refused_by_name(tiny: TinyModels) -> None:
    dense = read_model_config(tiny("llama", "float64").directory)
    with pytest.raises(TandemError, match="llama, which has no experts"):
        require_divisible(dense, 2, has_whole_experts=True)
    mixture = read_model_config(tiny("qwen2-moe", "float64").directory)
    with pytest.raises(TandemError, match="number of experts=6"):
        require_divisible(replace(mixture, kv_heads=4, heads=4), 4, has_whole_experts=True)


@pytest.mark.parametrize("graphs", [False, True])
def test_two_ranks_on_devices_that_compute_by_themselves(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """The next step is begun while one runs, and ids of chained slices are known on the first rank's device alone."""
    stand_in_for_a_gpu(monkeypatch, 4 << 30)
    reference = tiny("qwen3", "float64")
    whole = reference.executor(kernels="reference", block_size=8)
    engine = EngineConfig(
        tensor_parallel=2, block_size=8, max_num_seqs=8, cuda_graphs=graphs,
        kv_cache_memory=Bytes(_BLOCKS * whole.layout.block_bytes // 2), num_threads=1,
    )  # fmt: skip
    dtype = reference.dtype
    model = ModelConfig(id=str(reference.directory), dtype=dtype, device="cuda", cache_dir=reference.cache_dir)
    expected = [reference.greedy(prompt, _OUTPUTS) for prompt in _PROMPTS]
    with ranked_executor(reference.directory, model, engine) as executor:
        assert isinstance(executor, AsyncExecutor) and executor.num_blocks == _BLOCKS
        assert generate(executor, _PROMPTS, _OUTPUTS, chunk=7, chained=True, stagger=1) == expected
        prompt = tuple(random_prompts((16,))[0])
        piece = ScheduledSlice(
            SeqId(99), 0, 16, prompt, (BlockId(3), BlockId(5)), None, digest_blocks=(BlockId(3), BlockId(5))
        )
        (mine,) = executor.execute(StepPlan(500, (piece,))).slices
        (theirs,) = whole.execute(StepPlan(500, (piece,))).slices
    assert [len(digest.heads) for digest in mine.digests] == [whole.layout.group.heads] * 2
    assert [digest.block for digest in mine.digests] == [digest.block for digest in theirs.digests]


def test_four_ranks_and_a_vocabulary_that_they_do_not_divide(wide: Reference) -> None:
    expected = [wide.greedy(prompt, _OUTPUTS) for prompt in _PROMPTS]
    with ranked(wide, 4) as executor:
        assert executor.layout == wide.executor().layout and executor.num_blocks == _BLOCKS
        assert generate(executor, _PROMPTS, _OUTPUTS, chunk=7) == expected
        torch.testing.assert_close(
            teacher_forced(executor, _PROMPTS[-1]), wide.logits(_PROMPTS[-1]), atol=1e-9, rtol=1e-9
        )


def _check_logits(executor: AbstractContextManager[TorchExecutor], reference: Reference, tokens: Sequence[int]) -> None:
    with executor as ours:
        delta = teacher_forced(ours, tokens) - reference.logits(tokens)
    assert float(delta.abs().max()) < NEAR_TIE


@pytest.mark.parametrize(("model", "name"), [("llama", "awq"), ("qwen3-moe", "nvfp4")])
def test_two_ranks_of_weights_in_few_bits(tiny: TinyModels, tmp_path: Path, model: str, name: str) -> None:
    stored, values = write_random(tiny(model, "float32"), tmp_path, name)
    _check_logits(ranked(stored, 2), values, _PROMPTS[-1])


@pytest.mark.parametrize("name", ["llama-yarn", "qwen3"])
def test_logits_in_float32(tiny: TinyModels, name: str) -> None:
    """With and without biases."""
    reference = tiny(name, "float32")
    _check_logits(ranked(reference, 2), reference, _PROMPTS[-1])


def test_blocks_of_all_ranks_are_copied_kept_and_digested(wide: Reference) -> None:
    """A prompt's block goes to host memory, back to another place, and is copied to a third."""
    prompt = random_prompts((16,))[0]
    block, back, third, empty = (BlockId(i) for i in (3, 9, 20, 50))
    alone = wide.executor(kernels="reference", num_blocks=_BLOCKS)
    with ranked(wide, 4) as executor:
        executor.execute(StepPlan(0, (ScheduledSlice(SeqId(1), 0, 16, tuple(prompt), (block,), None),)))
        (digest,) = executor.cache.digest([block], [5])
        executor.execute(StepPlan(1, (), spills=((block, HostSlot(1)),)))
        executor.execute(StepPlan(2, (), fills=((HostSlot(1), back),), copies=((back, third),)))
        assert executor.cache.digest([third, back], [5, 5]) == [digest, digest]
        assert executor.cache.digest_here([third], [5]) == [digest[:1]]
        # Of a block that nobody has written a digest is its heads' numbers: they are the model's, in order.
        assert executor.cache.digest([empty], [2]) == alone.cache.digest([empty], [2])
        executor.cache.clear([third])
        assert executor.cache.digest([third], [2]) == alone.cache.digest([empty], [2])
        region = executor.cache.region
    assert len(set(digest)) == 4
    assert (region.head_start, region.head_stop, region.block_bytes) == (0, 1, alone.layout.block_bytes // 4)


def _without_forward(carry_out: Callable[[RankCommand], None]) -> Callable[[RankCommand], None]:
    """A follower that takes part in all but forward passes."""
    return lambda command: None if isinstance(command, Forward) else carry_out(command)


def test_a_rank_that_takes_no_part_ends_the_step(tiny: TinyModels) -> None:
    """It does not hang, and no slice's error hides it."""
    piece = ScheduledSlice(SeqId(1), 0, 3, (1, 2, 3), (BlockId(0),), None)
    with (
        ranked(tiny("llama", "float64"), 2, wrap=_without_forward, timeout_s=2.0) as executor,
        pytest.raises(RanksLost, match="Forward"),
    ):
        executor.execute(StepPlan(0, (piece,)))


@pytest.mark.nightly
def test_the_real_model_on_three_ranks(real: Reference) -> None:
    _check_logits(ranked(real, 3), real, range(1000, 1200))
