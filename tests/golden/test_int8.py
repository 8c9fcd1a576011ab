"""Test int8 weights: the compiled product equals the plain one, and the real model's answers stay sensible."""

from __future__ import annotations

import pytest
import torch

from tests.golden.conftest import TinyModels
from tests.golden.models import TINY_DENSE, Reference, random_prompt, teacher_forced

NUM_THREADS = 2
_WINDOW = 400


@pytest.mark.parametrize("name", sorted(TINY_DENSE))
def test_compiled_is_the_plain_meaning(tiny: TinyModels, name: str) -> None:
    reference, tokens = tiny(name, "float32"), random_prompt(70, 11)
    plain = teacher_forced(reference.executor(kernels="reference", quantization="int8"), tokens)
    compiled = teacher_forced(reference.executor(kernels="compiled", quantization="int8"), tokens)
    # A sum that differs in its last bit may move an activation across a rounding boundary, by a 127th of its group's
    # largest; all later rows see that through the KV. Until then the two agree.
    difference = (compiled - plain).abs().amax(dim=-1) / plain.std()
    assert float(difference[0]) < 1e-5
    assert float(difference.median()) < 0.1
    assert float(difference.max()) < 0.5


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_positions", [400, pytest.param(2000, marks=pytest.mark.nightly)])
def test_the_real_model_keeps_its_mind(real: Reference, texts: list[list[int]], num_positions: int) -> None:
    executor = real.executor(kernels="compiled", quantization="int8")
    divergences, agreements = [], []
    for start in range(0, num_positions, _WINDOW):
        tokens = texts[-1][start : start + _WINDOW]
        assert len(tokens) == _WINDOW
        exact = torch.log_softmax(real.logits(tokens).double(), -1)
        ours = torch.log_softmax(teacher_forced(executor, tokens).double(), -1)
        divergences.append((exact.exp() * (exact - ours)).sum(-1))
        agreements.append(exact.argmax(-1) == ours.argmax(-1))
    divergence, agreement = float(torch.cat(divergences).mean()), float(torch.cat(agreements).double().mean())
    print(f"int8: mean KL {divergence:.4f}, greedy agreement {agreement:.1%}")  # noqa: T201
    assert divergence <= 0.02
    assert agreement >= 0.93
