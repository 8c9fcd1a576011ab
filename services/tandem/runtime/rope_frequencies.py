"""Compute the inverse frequencies of rotary position embeddings from a model's configuration.

The formulas, and the order of their float32 operations, are those of the checkpoints' reference implementation
(transformers, `modeling_rope_utils`), so that angles are equal bit for bit.
"""

from __future__ import annotations

import math

import torch

from tandem.runtime.architectures.spec import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies of rotary embeddings, and the factor by which cosines and sines of components that
    are rotated are multiplied.

    The frequencies are float32 `[head_dim / 2]`, in radians per token. Entry i is the frequency of the pair of
    components i and i + head_dim / 2, in the order of `rope_order`. It is 0 for components that are not rotated."""
    rotary_dim = rope.rotary_dim or head_dim
    found, scale = _frequencies(rope, rotary_dim)
    return torch.nn.functional.pad(found, (0, (head_dim - rotary_dim) // 2)), scale


def rope_order(rope: RopeConfig, head_dim: int) -> torch.Tensor | None:
    """Return the order in which the decoder keeps the components of a head; None if it is the checkpoint's order.

    In the decoder, component i is rotated with component i + head_dim / 2. Entry i of the result, int64 `[head_dim]`,
    is the index that the decoder's component i has in the checkpoint. Products of queries and keys do not depend on the
    order, as long as both have the same."""
    rotary_dim, half = rope.rotary_dim or head_dim, head_dim // 2
    if rotary_dim == head_dim and not rope.is_interleaved:
        return None
    rotated = torch.arange(rotary_dim)
    pairs = rotated.view(-1, 2).T if rope.is_interleaved else rotated.view(2, -1)
    rest = torch.arange(rotary_dim, head_dim).view(2, -1)
    order = torch.cat((pairs, rest), dim=1)
    assert order.shape == (2, half)
    return order.flatten()


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return the frequencies of `head_dim` components that are all rotated, and the scale."""
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    if rope.kind == "longrope":
        return _longrope(rope, head_dim)
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        plain /= rope.factor
    elif rope.kind == "llama3":
        plain = _llama3(rope, plain)
    return plain, 1.0


def _longrope(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return LongRoPE frequencies and scale (https://arxiv.org/abs/2402.13753)."""
    assert rope.original_length
    factors = torch.tensor(rope.long_factor if rope.is_long else rope.short_factor, dtype=torch.float32)
    powers = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    scale = rope.attention_factor
    if scale is None:
        is_extended = rope.factor > 1
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length)) if is_extended else 1.0
    return 1.0 / (factors * rope.theta**powers), scale


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Apply the scaling of Llama 3.1: divide low frequencies by `factor`, keep high ones, interpolate between."""
    assert rope.original_length and rope.low_freq_factor and rope.high_freq_factor
    low, high = rope.low_freq_factor, rope.high_freq_factor
    longest, shortest = rope.original_length / low, rope.original_length / high
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > longest, plain / rope.factor, plain)
    smooth = (rope.original_length / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(is_between, between, scaled)


def _yarn(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return YaRN frequencies and scale (https://arxiv.org/abs/2309.00071).

    Dimensions that turn often enough within the original context keep their frequency, slow ones are interpolated,
    with a linear ramp between."""
    assert rope.original_length
    positions = rope.theta ** (torch.arange(0, head_dim, 2).to(torch.float32) / head_dim)
    kept, interpolated = 1.0 / positions, 1.0 / (rope.factor * positions)
    low, high = _ramp_bounds(rope, head_dim, rope.original_length)
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept_fraction = 1 - ramp
    return interpolated * (1 - kept_fraction) + kept * kept_fraction, _yarn_scale(rope)


def _ramp_bounds(rope: RopeConfig, head_dim: int, original_length: int) -> tuple[float, float]:
    """Return the first and the last dimension of YaRN's linear ramp."""

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_scale(rope: RopeConfig) -> float:
    """Return YaRN's factor on cosines and sines, the "mscale" of the reference implementation."""

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
