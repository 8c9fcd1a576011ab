"""List the families of models that can be served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.runtime.architectures.fields import Fields
from tandem.runtime.architectures.glm import glm4, glm4_moe
from tandem.runtime.architectures.granite import granite, granite_moe
from tandem.runtime.architectures.llama import llama, mistral
from tandem.runtime.architectures.mixtral import mixtral
from tandem.runtime.architectures.olmo import olmo2, olmoe
from tandem.runtime.architectures.phi import phi3
from tandem.runtime.architectures.qwen import qwen2, qwen2_moe, qwen3, qwen3_moe
from tandem.runtime.architectures.smollm3 import smollm3
from tandem.runtime.architectures.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Family:
    """Family of models. `architecture`: name of the family's class in config.json. `read`: function that turns the
    fields of a config.json into a specification, and raises TandemError for a field that is not supported."""

    architecture: str
    read: Callable[[Fields], DecoderSpec]


FAMILIES = {
    "llama": Family("LlamaForCausalLM", llama),
    "mistral": Family("MistralForCausalLM", mistral),
    "qwen2": Family("Qwen2ForCausalLM", qwen2),
    "qwen3": Family("Qwen3ForCausalLM", qwen3),
    "smollm3": Family("SmolLM3ForCausalLM", smollm3),
    "olmo2": Family("Olmo2ForCausalLM", olmo2),
    "granite": Family("GraniteForCausalLM", granite),
    "phi3": Family("Phi3ForCausalLM", phi3),
    "glm4": Family("Glm4ForCausalLM", glm4),
    "mixtral": Family("MixtralForCausalLM", mixtral),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", qwen2_moe),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qwen3_moe),
    "olmoe": Family("OlmoeForCausalLM", olmoe),
    "granitemoe": Family("GraniteMoeForCausalLM", granite_moe),
    "glm4_moe": Family("Glm4MoeForCausalLM", glm4_moe),
}
"""The families, by `model_type` of config.json."""
