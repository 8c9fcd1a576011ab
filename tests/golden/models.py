"""Models that golden tests run on and what transformers says about them; never drives an executor.

Tiny models are made from transformers configurations with random weights, saved, and loaded from the directory like
any other. The real model is the alias of the catalog; its directory lies in `TANDEM_CACHE_DIR`, else in the default
cache, so that it is imported once per machine.
"""

from __future__ import annotations

import itertools
import os
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    Glm4MoeConfig,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    LogitsProcessorList,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from loadtest.common.float_copy import float_copy
from tandem.core.config import Bytes, EngineConfig, ModelConfig
from tandem.core.ids import BlockId, SeqId
from tandem.core.request import SamplingParams
from tandem.kv.layout import KVGroup, KVLayout
from tandem.runtime.grammar_engine import LlguidanceMasks
from tandem.runtime.model_config import for_longest, read_model_config
from tandem.runtime.model_loader import AnyExecutor, load_executor
from tandem.runtime.model_store import cache_root, resolve_model
from tandem.runtime.sampler import filters_of
from tandem.sched.state.step_plan import ScheduledSlice
from tandem_kernels.reference.philox import uniform
from tandem_kernels.reference.sample import kept_tokens
from tests.effort import IS_NIGHTLY
from tests.executor_logits import executor_logits
from tests.golden.penalties import parameters_of, processors
from tests.golden.recorded import IS_RECORDING, digest_of_model, name_of_prompt, record, recorded

Kernels = Literal["auto", "compiled", "reference"]
Quantization = Literal["none", "int8"]
REAL_MODEL = "smollm2-135m-instruct"
TINY_VOCAB = 256


def random_prompts(lengths: Sequence[int], seed: int = 7, vocab: int = TINY_VOCAB) -> list[list[int]]:
    """Return token ids, of the tiny models unless `vocab` says otherwise, drawn one prompt after the other."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def random_prompt(length: int, seed: int, vocab: int = TINY_VOCAB) -> list[int]:
    return random_prompts([length], seed, vocab)[0]


# Near-tie rule of the design: below this margin of the reference's two best logits, either may win.
NEAR_TIE = 5e-4

SHAPE: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

TINY_FIRST: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, rope_parameters=_LLAMA3),
    "llama-yarn": lambda: LlamaConfig(**SHAPE, rope_parameters=_YARN, attention_bias=True, mlp_bias=True),
    "llama-linear": lambda: LlamaConfig(**SHAPE, rope_parameters=_LINEAR, tie_word_embeddings=True),
    "llama-long": lambda: LlamaConfig(**SHAPE | {"max_position_embeddings": 8192}),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=32),
}
"""Tiny models whose full product of knobs `make nightly` takes."""

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}

TINY_FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "smollm3": lambda: SmolLM3Config(**SHAPE, no_rope_layer_interval=3),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "granite": lambda: GraniteConfig(**SHAPE, **_MULTIPLIERS),
    "phi3": lambda: Phi3Config(**SHAPE | {"pad_token_id": 0}, partial_rotary_factor=0.75),
    "glm4": lambda: Glm4Config(**SHAPE, head_dim=16, partial_rotary_factor=0.5, attention_bias=True),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **SHAPE, **_EXPERTS, num_experts=6, shared_expert_intermediate_size=80, decoder_sparse_step=2
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SHAPE, **_EXPERTS, head_dim=32, num_experts=8, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    "olmoe": lambda: OlmoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=3),
    "granitemoe": lambda: GraniteMoeConfig(**SHAPE, **_MULTIPLIERS, num_local_experts=4, num_experts_per_tok=2),
    "glm4-moe": lambda: Glm4MoeConfig(
        **SHAPE, **_EXPERTS, head_dim=16, n_routed_experts=8, n_group=4, topk_group=2, routed_scaling_factor=1.5,
        use_qk_norm=True,
    ),
}  # fmt: skip
"""Tiny models of the other families."""

TINY = TINY_FIRST | TINY_FAMILIES
TINY_DENSE = (*TINY_FIRST, "smollm3", "olmo2", "granite", "phi3", "glm4")
"""Names of tiny models without experts."""


@dataclass(frozen=True)
class Reference:
    """A model directory and transformers' model of it in `dtype`, loaded when it is first asked for logits."""

    directory: Path
    dtype: str
    cache_dir: str

    @cached_property
    def floats(self) -> Path:
        """The directory that transformers reads."""
        return float_copy(self.directory)

    @cached_property
    def model(self) -> Any:
        return _load(self.floats, self.dtype)

    @cached_property
    def digest(self) -> str:
        return digest_of_model(self.floats, self.dtype)

    def greedy(self, prompt: Sequence[int], count: int, sampling: SamplingParams | None = None) -> list[int]:
        """Return the `count` tokens that transformers' `generate` continues `prompt` with, with no end of sequence.

        `sampling` says which penalties and biases change the logits. Recorded answers are taken where there are some;
        in `make nightly` they are computed again, and may differ at near-ties alone.
        """
        name = name_of_prompt(prompt, count, sampling and parameters_of(sampling))
        found = recorded(self.digest, name)
        if found is None:
            found = self._generate(prompt, count, sampling)
            record(self.digest, name, found)
        elif IS_NIGHTLY:
            check_greedy(self, prompt, found, sampling)
        return list(found)

    def has_recorded(self, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams | None) -> bool:
        """Tell whether `output` is the recorded greedy answer; it is computed where answers are being recorded."""
        if IS_RECORDING:
            return self.greedy(prompt, len(output), sampling) == list(output)
        name = name_of_prompt(prompt, len(output), sampling and parameters_of(sampling))
        return recorded(self.digest, name) == list(output)

    @torch.inference_mode()
    def _generate(self, prompt: Sequence[int], count: int, sampling: SamplingParams | None) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            num_beams=1,
            pad_token_id=0,
            eos_token_id=None,
            use_cache=True,
            logits_processor=LogitsProcessorList(processors(sampling, len(prompt)) if sampling else []),
        )
        return [int(token) for token in out[0, len(prompt) :]]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits `[len(tokens), vocab]`."""
        logits: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits
        return logits[0]

    @torch.inference_mode()
    def last_logits(self, tokens: Sequence[int], count: int) -> torch.Tensor:
        """Teacher-forced logits `[count, vocab]` of the last `count` positions."""
        return self.model(torch.tensor([list(tokens)]), logits_to_keep=count).logits[0]

    def executor(
        self,
        *,
        block_size: int = 16,
        num_blocks: int = 64,
        kernels: Kernels = "auto",
        quantization: Quantization = "none",
        compact: bool = True,
        grammars: LlguidanceMasks | None = None,
        num_host_slots: int = 0,
        on_device: bool = False,
        device: Literal["cpu", "cuda"] = "cpu",
        batch_invariant: bool = False,
        max_num_seqs: int = 8,
        max_model_len: int = 0,
    ) -> AnyExecutor:
        """Ours, of the same directory and dtype, with as many threads as torch has. `on_device`: the one of GPUs, on
        the CPU with reference kernels. `device` "cuda": the one of GPUs, on one, with graphs up to `max_num_seqs`."""
        config = for_longest(read_model_config(self.directory), max_model_len)
        layout = KVLayout(block_size, (KVGroup(config.num_layers, config.kv_heads, config.head_dim, self.dtype),))
        engine = EngineConfig(
            block_size=block_size,
            kv_cache_memory=Bytes(num_blocks * layout.block_bytes),
            host_cache_memory=Bytes(num_host_slots * layout.block_bytes),
            num_threads=torch.get_num_threads(),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            kernels="reference" if on_device else kernels,
            plan_depth=2 if on_device or device == "cuda" else 1,
        )
        model = ModelConfig(
            dtype=self.dtype,
            quantization=quantization,
            compact=compact,
            cache_dir=self.cache_dir,
            device=device,
            batch_invariant=batch_invariant,
        )
        return load_executor(self.directory, config, model, engine, grammars)


def make_tiny(name: str, directory: Path, dtype: str) -> Reference:
    """Write the tiny model `name` to `directory` and load it back with transformers."""
    seed = 1 + sorted(TINY_FIRST).index(name) if name in TINY_FIRST else zlib.crc32(name.encode())
    return make_random(TINY[name](), seed, directory, dtype)


def make_wide(directory: Path, dtype: str) -> Reference:
    """One with as many KV heads as four ranks need, and a vocabulary that four do not divide."""
    shape = SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": TINY_VOCAB + 1}
    return make_random(LlamaConfig(**shape, rope_parameters=_LLAMA3, mlp_bias=True), 99, directory, dtype)


def make_random(config: PretrainedConfig, seed: int, directory: Path, dtype: str) -> Reference:
    """Write a model of random weights to `directory` and load it back with transformers."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _randomise(parameter_name, parameter)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                # As many bits as float32 adds to a score without rounding much away.
                buffer.copy_(torch.randn(buffer.shape).mul_(4).round_().div_(16))
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return Reference(directory, dtype, str(directory / "cache"))


def real_model() -> Reference:
    """The catalog's model in float32, imported on first use."""
    cache_dir = os.environ.get("TANDEM_CACHE_DIR", "")
    directory = resolve_model(REAL_MODEL, cache_root(cache_dir))
    return Reference(directory, "float32", cache_dir)


def _load(directory: Path, dtype: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="sdpa", experts_implementation="eager"
    )
    return model.eval()


def _randomise(name: str, parameter: torch.Tensor) -> None:
    """Weights large enough that logits are spread and every part, also biases and norms, matters."""
    if name.endswith("norm.weight"):
        parameter.normal_(1.0, 0.2)
    elif parameter.ndim == 1:
        parameter.normal_(0.0, 0.3)
    elif "embed_tokens" in name:
        parameter.normal_(0.0, 1.0)
    else:
        parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)


@dataclass(frozen=True, slots=True)
class NearTie:
    """Where two greedy streams part although both are right."""

    index: int
    margin: float
    delta: float

    def __str__(self) -> str:
        return f"near-tie at output {self.index}: margin {self.margin:.1e}, max |delta logit| {self.delta:.1e}"


def check_equal(
    reference: Reference, executor: AnyExecutor, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]
) -> NearTie | None:
    """Assert that `got` is `expected`, or parts from it at a near-tie of the reference's logits and stays within the
    tolerance when both models are given `expected`."""
    assert len(got) == len(expected)
    parted = next((i for i, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]), None)
    if parted is None:
        return None
    tokens = [*prompt, *expected]
    theirs = reference.logits(tokens)[len(prompt) + parted - 1 : -1]
    ours = teacher_forced(executor, tokens)[len(prompt) + parted - 1 : -1]
    best, second = torch.topk(theirs[0], 2).values.tolist()
    delta = float((ours - theirs).abs().max())
    assert best - second < NEAR_TIE, f"output {parted}: {got[parted]} for {expected[parted]}, margin {best - second}"
    assert delta < NEAR_TIE, f"teacher-forced logits differ by {delta}"
    return NearTie(parted, best - second, delta)


def check_greedy(
    reference: Reference, prompt: Sequence[int], got: Sequence[int], sampling: SamplingParams | None = None
) -> list[NearTie]:
    """Assert that each token of `got` is transformers' greedy choice after the tokens before it, near-ties excepted.

    `sampling` says which penalties and biases change the logits. That is the same as equality with its `generate`, at
    the price of one forward pass, or of none for a recorded answer. `delta` of a tie is left 0.
    """
    if not IS_NIGHTLY and reference.has_recorded(prompt, got, sampling):
        return []
    logits = reference.last_logits([*prompt, *got[:-1]], len(got))
    ties: list[NearTie] = []
    for index, (row, token) in enumerate(zip(logits, got, strict=True)):
        for processor in processors(sampling, len(prompt)) if sampling else ():
            row = processor(torch.tensor([[*prompt, *got[:index]]]), row[None])[0]
        margin = float(row.max() - row[token])
        assert margin < NEAR_TIE, f"output {index}: {token} for {int(row.argmax())}, which is better by {margin}"
        if int(row.argmax()) != token:
            ties.append(NearTie(index, margin, 0.0))
    return ties


def check_sampled(
    reference: Reference, prompt: Sequence[int], got: Sequence[int], params: SamplingParams
) -> list[NearTie]:
    """Assert that each token of `got` is what our draw yields from transformers' logits after the tokens before it.

    `margin` of a tie is the distance of the random number to the token's share of the distribution, at most `NEAR_TIE`.
    """
    logits = reference.last_logits([*prompt, *got[:-1]], len(got)).to(torch.float64)
    ties: list[NearTie] = []
    for index, (row, token) in enumerate(zip(logits, got, strict=True)):
        kept = kept_tokens(row, filters_of(params)).tolist()
        shares = torch.softmax(row[kept] / params.temperature, 0).cumsum(0).tolist()
        assert token in kept, f"output {index}: {token} was filtered out"
        place, number = kept.index(token), uniform(params.seed, 0, index)
        margin = max(0.0, (shares[place - 1] if place else 0.0) - number, number - shares[place])
        assert margin < NEAR_TIE, f"output {index}: {token} was drawn {margin} away from its share"
        if margin > 0:
            ties.append(NearTie(index, margin, 0.0))
    return ties


def teacher_forced(executor: AnyExecutor, tokens: Sequence[int]) -> torch.Tensor:
    """Our logits `[len(tokens), vocab]`, computed at once in blocks from the start of the pool."""
    return in_chunks(executor, tokens, [len(tokens)])


def in_chunks(
    executor: AnyExecutor, tokens: Sequence[int], sizes: Sequence[int], *, has_all_blocks: bool = False
) -> torch.Tensor:
    """Our logits of all rows, computed in slices of `sizes`, again and again, in blocks from the start of the pool.
    Each slice has the blocks of its context, or those of all tokens (`has_all_blocks`)."""
    rows: list[torch.Tensor] = []
    start, turns = 0, itertools.cycle(sizes)
    while start < len(tokens):
        stop = min(len(tokens), start + next(turns))
        num_blocks = executor.layout.num_blocks_for(len(tokens) if has_all_blocks else stop)
        blocks = tuple(map(BlockId, range(num_blocks)))
        piece = ScheduledSlice(SeqId(-1), start, stop - start, tuple(tokens[start:stop]), blocks, None)
        rows.append(executor_logits(executor, piece))
        start = stop
    return torch.cat(rows)
