"""Test that the counts of experts are those of the router's choices, whatever computes them and in whatever steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig

from tandem.core.config import Bytes, Config, EngineConfig, ModelConfig
from tandem.core.ids import BlockId, SeqId
from tandem.runtime.architectures.spec import ExpertsMlp
from tandem.runtime.cuda_graphs import GraphedModel
from tandem.runtime.model_config import read_model_config
from tandem.runtime.model_loader import AnyExecutor
from tandem.runtime.models.decoder import Decoder
from tandem.sched.state.step_plan import ScheduledSlice, StepPlan
from tandem.worker.model.worker_model import load_worker_model
from tandem_kernels.contract import ExpertRouting
from tandem_kernels.dispatch import REFERENCE
from tests.golden.conftest import TinyModels
from tests.golden.models import SHAPE, TINY, TINY_DENSE, Reference, make_random, random_prompts
from tests.golden.steps import generate
from tests.stand_in import stand_in_for_a_gpu
from tests.tokenizer import train_tokenizer

_OUTPUTS = 6
_PROMPTS = random_prompts((1, 16, 40))
_NUM_TOKENS = sum(map(len, _PROMPTS)) + len(_PROMPTS) * (_OUTPUTS - 1)
"""Tokens that a model computes: the last output of each prompt is not computed."""
_WITH_EXPERTS = sorted(name for name in TINY if name not in TINY_DENSE)


def _mixtures(reference: Reference) -> dict[int, ExpertsMlp]:
    layers = enumerate(read_model_config(reference.directory).layers)
    return {index: layer.mlp for index, layer in layers if isinstance(layer.mlp, ExpertsMlp)}


def _counts(executor: AnyExecutor) -> dict[int, list[int]]:
    return {layer: list(tokens) for layer, tokens in executor.model.expert_tokens().items()}


def _routed(reference: Reference) -> dict[int, list[int]]:
    """Generate from the prompts and return the tokens of each expert by layer, from what the router chose."""
    executor, mixtures = reference.executor(kernels="reference"), _mixtures(reference)
    chosen: list[torch.Tensor] = []

    def route(
        logits: torch.Tensor, bias: torch.Tensor | None, routing: ExpertRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        experts, weights = REFERENCE.route(logits, bias, routing)
        chosen.append(experts.flatten())
        return experts, weights

    assert isinstance(executor.model, Decoder)
    executor.model._kernels = replace(REFERENCE, route=route)
    generate(executor, _PROMPTS, _OUTPUTS)
    return {
        layer: torch.cat(chosen[number :: len(mixtures)]).bincount(minlength=mlp.count).tolist()
        for number, (layer, mlp) in enumerate(mixtures.items())
    }


@pytest.mark.parametrize("name", _WITH_EXPERTS)
def test_every_token_is_counted_for_the_experts_that_its_router_chose(tiny: TinyModels, name: str) -> None:
    reference = tiny(name, "float32")
    expected = _routed(reference)
    plain = reference.executor(kernels="reference")
    torch.set_num_threads(2)  # of the compiled kernels; one of them counts
    compiled = reference.executor(kernels="compiled")
    generate(plain, _PROMPTS, _OUTPUTS)
    generate(compiled, _PROMPTS, _OUTPUTS, chunk=7, chained=True, stagger=1)
    assert _counts(plain) == expected and _counts(compiled) == expected
    sums = {layer: mlp.routing.num_chosen * _NUM_TOKENS for layer, mlp in _mixtures(reference).items()}
    assert {layer: sum(tokens) for layer, tokens in expected.items()} == sums


def test_rows_that_pad_a_graph_are_not_counted(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences decode in a graph of four."""
    stand_in_for_a_gpu(monkeypatch, 4 << 30)
    reference = tiny("qwen3-moe", "float32")
    executor = reference.executor(device="cuda")
    assert isinstance(executor.model, GraphedModel)
    generate(executor, _PROMPTS, _OUTPUTS, chained=True)
    assert _counts(executor) == _routed(reference)


@pytest.mark.parametrize("kernels", ["reference", "compiled"])
def test_a_model_without_experts_has_no_counts(tiny: TinyModels, kernels: str) -> None:
    executor = tiny("llama", "float32").executor(kernels="reference" if kernels == "reference" else "compiled")
    generate(executor, _PROMPTS, 1)
    assert _counts(executor) == {}


def test_a_worker_s_model_has_the_counts_of_its_executor(tmp_path: Path) -> None:
    tokenizer = train_tokenizer()
    config = Qwen3MoeConfig(
        **SHAPE | {"vocab_size": tokenizer.get_vocab_size()},
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    )
    directory = make_random(config, 5, tmp_path, "float32").directory
    tokenizer.save(str(directory / "tokenizer.json"))
    model = load_worker_model(
        Config(
            model=ModelConfig(id=str(directory), dtype="float32", cache_dir=str(tmp_path / "cache")),
            engine=EngineConfig(block_size=16, kv_cache_memory=Bytes(1 << 20), num_threads=1),
        )
    )
    assert _sums(model.expert_tokens()) == [0, 0, 0]
    piece = ScheduledSlice(SeqId(0), 0, 9, tuple(range(9)), (BlockId(0),), None)
    model.executor.execute(StepPlan(0, (piece,)))
    assert _sums(model.expert_tokens()) == [18, 18, 18]


def _sums(tokens: Mapping[int, Sequence[int]]) -> list[int]:
    return [sum(tokens[layer]) for layer in range(len(tokens))]
