"""Test the table of docs/models.md against the code, and that files of published models are accepted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tandem.core.errors import TandemError
from tandem.runtime.architectures.quantization_config import read_stored_formats
from tandem.runtime.architectures.spec import DecoderSpec, ExpertsMlp
from tandem.runtime.architectures.stored_format import GGUF_FORMATS
from tandem.runtime.architectures.table import FAMILIES
from tandem.runtime.gguf_architectures import ARCHITECTURES
from tandem.runtime.model_config import parse_model_config
from tandem.runtime.models.compiled import shape_of
from tandem.runtime.parallel.shard import require_divisible
from tandem_kernels.device_codes import has_nibbles
from tandem_kernels.native.decoder import unsupported
from tandem_kernels.reference.coded import CodedMatrix, NumberFormat
from tests.unit.runtime.published_configs import PUBLISHED_CONFIGS

_PAGE = (Path(__file__).resolve().parents[3] / "docs/models.md").read_text()
_ROWS = re.findall(r"^\| `(\w+)` \|[^|]+\| ([^|]+) \| (yes|no) \|$", _PAGE, re.M)
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"num_experts": 4},
    "olmoe": {"num_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    "glm4_moe": {"n_routed_experts": 4, "n_shared_experts": 1},
}
_OF_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size")


def _smallest(model_type: str) -> DecoderSpec:
    sizes = {"model_type": model_type, **_SIZES, **_EXPERTS.get(model_type, {})}
    if model_type not in _EXPERTS:
        sizes = {name: value for name, value in sizes.items() if name not in _OF_EXPERTS}
    if model_type in ("mixtral", "olmoe", "granitemoe"):
        del sizes["moe_intermediate_size"]
    if model_type == "mistral":
        sizes["sliding_window"] = None
    return parse_model_config(sizes)


def test_the_table_lists_every_family_as_the_code_has_it() -> None:
    assert [name for name, *_ in _ROWS] == list(FAMILIES)
    for name, mlp, parallel in _ROWS:
        spec = _smallest(name)
        assert spec.has_experts == mlp.startswith("experts"), name
        mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, ExpertsMlp)]
        assert any(mixture.shared_inner for mixture in mixtures) == ("shared" in mlp), name
        assert unsupported(shape_of(spec)) is None, name
        assert _splits(spec) == (parallel == "yes"), name


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_published_models_are_accepted(name: str) -> None:
    spec = parse_model_config(PUBLISHED_CONFIGS[name])
    assert unsupported(shape_of(spec)) is None
    assert spec.rope.kind == ("longrope" if name == "Phi-4-mini-instruct" else "default")
    assert bool(spec.stored) == name.endswith("FP8")


def test_the_table_of_formats_lists_every_quant_method() -> None:
    listed = set(re.findall(r"^\| `([\w-]+)` \| [^|]*\| (?:e4m3|int|e2m1)", _PAGE, re.M))
    with pytest.raises(TandemError) as caught:
        read_stored_formats({"quant_method": "another"})
    assert listed == set(caught.value.message.partition("(known: ")[2].rstrip(")").split(", "))


def test_the_page_lists_what_becomes_of_gguf_files() -> None:
    types = re.search(r"^\| `gguf` \| (Q4_0.*?) \|", _PAGE, re.M), re.search(r"^\| `gguf` \| (Q2_K.*?) \|", _PAGE, re.M)
    listed = [name.lower() for found in types if found for name in found[1].split(", ")]
    assert sorted(listed) == sorted(GGUF_FORMATS)
    wide = [name.lower() for found in re.findall(r"\| 4; 8 for (.*?) \|", _PAGE) for name in found.split(", ")]
    assert sorted(wide) == sorted(name for name in GGUF_FORMATS if not has_nibbles(_numbers_of(name)))
    (architectures,) = re.findall(r"Architectures: (.*?), with byte-level", _PAGE, re.S)
    assert re.findall(r"`(\w+)`", architectures) == list(ARCHITECTURES)


def _numbers_of(name: str) -> NumberFormat:
    """Return the numbers of one of ggml's types."""
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    blocks = torch.zeros((1, 256 // size * num_bytes), dtype=torch.uint8)
    matrix = GGUF_FORMATS[name].read({f".weight_{name}": blocks}, (1, 256))
    assert isinstance(matrix, CodedMatrix)
    return matrix.numbers


def _splits(spec: DecoderSpec) -> bool:
    try:
        require_divisible(spec, 2)
    except TandemError:
        return False
    return True
