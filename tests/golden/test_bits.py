"""Test that with compiled kernels a row's logits are bit-identical, whatever shares its step or cut its prompt."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from tandem.core.ids import BlockId, SeqId
from tandem.core.request import SamplingParams
from tandem.sched.state.step_plan import Sampling, ScheduledSlice, StepPlan
from tests.golden.conftest import TinyModels
from tests.golden.models import TINY, TINY_DENSE, Quantization, Reference, in_chunks, random_prompt, teacher_forced
from tests.golden.stored_formats import write_random

_LENGTH = 150
_REAL_VOCAB = 49152


Cut = tuple[int, tuple[int, ...]]
"""A block size, and sizes of slices."""


def _check_cuts(
    reference: Reference, tokens: Sequence[int], cuts: Iterable[Cut], quantization: Quantization = "none"
) -> None:
    whole = teacher_forced(reference.executor(kernels="compiled", quantization=quantization), tokens)
    for block_size, sizes in cuts:
        executor = reference.executor(block_size=block_size, kernels="compiled", quantization=quantization)
        assert torch.equal(in_chunks(executor, tokens, sizes), whole), f"blocks of {block_size}, chunks {sizes}"


@pytest.mark.parametrize(
    ("name", "quantization"),
    [*((name, "none") for name in sorted(TINY)), *((name, "int8") for name in sorted(TINY_DENSE))],
)
def test_cuts_of_a_prompt_change_no_bit(tiny: TinyModels, name: str, quantization: Quantization) -> None:
    cuts = itertools.product((8, 32), ((1,), (2, 3, 5), (13,), (64,), (100, 1)))
    _check_cuts(tiny(name, "float32"), random_prompt(_LENGTH, 3), cuts, quantization)


@pytest.mark.parametrize("name", ["qwen3-moe", "granitemoe"])
def test_long_chunks_of_a_model_with_experts_change_no_bit(tiny: TinyModels, name: str) -> None:
    """Of up to 512 rows, more than a product takes at once even for one expert."""
    reference, tokens = tiny(name, "float32"), random_prompt(512, 3)
    whole = teacher_forced(reference.executor(kernels="compiled"), tokens)
    for sizes in ((16,), (300, 212)):
        assert torch.equal(in_chunks(reference.executor(kernels="compiled"), tokens, sizes), whole), sizes


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", ["awq", "int8", "mxfp4"])
def test_cuts_change_no_bit_of_weights_in_few_bits(
    tiny: TinyModels, tmp_path: Path, name: str, quantization: Quantization
) -> None:
    model = "llama" if quantization == "int8" else "qwen3-moe"
    stored, _ = write_random(tiny(model, "float32"), tmp_path, name)
    _check_cuts(stored, random_prompt(_LENGTH, 3), ((8, (1,)), (32, (2, 3, 5)), (16, (100, 1))), quantization)


@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=pytest.mark.nightly)])
def test_cuts_of_a_prompt_change_no_bit_of_the_real_model(real: Reference, quantization: Quantization) -> None:
    _check_cuts(real, random_prompt(50, 3, _REAL_VOCAB), ((8, (1,)), (32, (7, 30, 2))), quantization)


@pytest.mark.nightly
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_many_cuts_of_a_prompt_change_no_bit_of_the_real_model(real: Reference, quantization: Quantization) -> None:
    cuts = itertools.product((8, 32), ((1,), (7, 30, 2), (64,)))
    _check_cuts(real, random_prompt(_LENGTH, 3, _REAL_VOCAB), cuts, quantization)


@pytest.mark.parametrize("length", [30, pytest.param(_LENGTH, marks=pytest.mark.nightly)])
def test_weights_in_fewer_bits_change_no_bit_of_the_real_model(real: Reference, length: int) -> None:
    tokens = random_prompt(length, 5, _REAL_VOCAB)
    compact, floats = (real.executor(kernels="compiled", compact=compact) for compact in (True, False))
    for sizes in ((1,), (2, 3, 5), (64,)):
        assert torch.equal(in_chunks(compact, tokens, sizes), in_chunks(floats, tokens, sizes))


@pytest.mark.parametrize("name", ["llama", "glm4-moe"])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_company_and_threads_change_no_bit(tiny: TinyModels, num_threads: int, name: str) -> None:
    reference = tiny(name, "float32")
    alone = teacher_forced(reference.executor(kernels="compiled"), random_prompt(_LENGTH, 0))
    torch.set_num_threads(num_threads)
    executor = reference.executor(num_blocks=400, kernels="compiled")
    count = executor.layout.num_blocks_for(_LENGTH)
    greedy = Sampling(SamplingParams(max_tokens=1, temperature=0, logprobs=3), 0, 0)
    slices = [
        ScheduledSlice(
            SeqId(seed),
            0,
            length,
            tuple(random_prompt(length, seed)),
            tuple(BlockId(seed * count + i) for i in range(executor.layout.num_blocks_for(length))),
            greedy,
        )
        for seed, length in enumerate((_LENGTH, 1, 17, 80, 2, 150, *range(1, 28)))
    ]
    together = executor.execute(StepPlan(0, tuple(slices))).slices
    for piece, result in zip(slices, together, strict=True):
        executor = reference.executor(num_blocks=400, kernels="compiled")
        assert executor.execute(StepPlan(0, (piece,))).slices[0] == result
    assert together[0].tokens[0].id == int(alone[-1].argmax())
