"""Test LongRoPE: a worker whose requests may pass the original length computes with the long frequencies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import Glm4Config, Phi3Config, PretrainedConfig

from tandem.core.errors import TandemError
from tandem.runtime.fingerprint import architecture_digest
from tandem.runtime.model_config import for_longest, parse_model_config, read_model_config
from tests.golden.gguf_files import gguf_reference
from tests.golden.models import SHAPE, Kernels, Reference, make_random, random_prompt, teacher_forced

_ORIGINAL, _LONG = 64, 100
_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.6, 1.7, 1.8],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": _ORIGINAL,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    config = Phi3Config(
        **SHAPE | {"pad_token_id": 0}, original_max_position_embeddings=_ORIGINAL, rope_parameters=_ROPE
    )
    return make_random(config, 5, tmp_path_factory.mktemp("phi3-long"), "float32")


def _check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((ours - theirs).abs().max() / theirs.std()) < 2e-5


@pytest.mark.parametrize("kernels", ["compiled", "reference"])
@pytest.mark.parametrize(("length", "max_model_len"), [(_LONG, 0), (_LONG, _ORIGINAL + 1), (50, _ORIGINAL)])
def test_logits_are_those_of_the_length(model: Reference, kernels: Kernels, length: int, max_model_len: int) -> None:
    tokens = random_prompt(min(length, max_model_len or length), 3)
    if max_model_len == _ORIGINAL + 1:
        tokens = random_prompt(_ORIGINAL + 1, 3)
    executor = model.executor(kernels=kernels, max_model_len=max_model_len)
    _check(teacher_forced(executor, tokens), model.logits(tokens))


def _phi4_mini() -> Phi3Config:
    rope = _ROPE | {name: _ROPE[name][:6] for name in ("short_factor", "long_factor")} | {"partial_rotary_factor": 0.75}
    fields = SHAPE | {"pad_token_id": 0}
    return Phi3Config(**fields, original_max_position_embeddings=_ORIGINAL, rope_parameters=rope)


def _glm4() -> Glm4Config:
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": _ORIGINAL}
    return Glm4Config(**SHAPE, head_dim=32, rope_parameters=rope | {"partial_rotary_factor": 0.5})


@pytest.mark.parametrize("kernels", ["compiled", "reference"])
@pytest.mark.parametrize("config", [_phi4_mini, _glm4])
def test_a_part_of_a_head_is_rotated(tmp_path: Path, config: Callable[[], PretrainedConfig], kernels: Kernels) -> None:
    """As in Phi-4-mini with LongRoPE and in GLM-4 with YaRN, whose other components are not scaled either."""
    model = make_random(config(), 5, tmp_path, "float32")
    for length, max_model_len in ((_LONG, 0), (50, _ORIGINAL)):
        tokens = random_prompt(length, 3)
        executor = model.executor(kernels=kernels, max_model_len=max_model_len)
        _check(teacher_forced(executor, tokens), model.logits(tokens))


def test_a_gguf_file_has_both_kinds_of_frequencies(model: Reference, tmp_path: Path) -> None:
    stored = gguf_reference(model, "phi3", GGMLQuantizationType.Q8_0, tmp_path)
    for length, max_model_len in ((_LONG, 0), (50, _ORIGINAL)):
        tokens = random_prompt(length, 3)
        _check(teacher_forced(stored.executor(max_model_len=max_model_len), tokens), stored.logits(tokens))


def test_workers_of_different_frequencies_are_different_models(model: Reference) -> None:
    spec = read_model_config(model.directory)
    short, long = for_longest(spec, _ORIGINAL), for_longest(spec, 0)
    assert (short.max_length, long.max_length) == (_ORIGINAL, 512)
    assert architecture_digest(short) != architecture_digest(long)


def test_factors_of_another_number_are_refused(model: Reference) -> None:
    config = {"model_type": "phi3", **{name: value for name, value in SHAPE.items() if value is not None}}
    with pytest.raises(TandemError, match="long_factor of 7 numbers for 8 frequencies"):
        parse_model_config(config | {"rope_parameters": _ROPE | {"long_factor": [1.0] * 7}})
