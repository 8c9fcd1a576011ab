"""Compute the least time that a step of a model can take, from limits measured on the same machine.

Products take the larger of the time to read their weights and the time to multiply; attention likewise, on top. Left
out: activations, norms, sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.runtime.architectures.spec import DecoderSpec, DenseMlp, ExpertsMlp


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a machine per second: bytes of a copy, read and written, and operations of matrix products."""

    memory: float
    matrix: float


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a model step.

    `rows`: tokens that the model computes. `sampled`: rows whose logits are computed. `context`: tokens whose KV is
    read. `pairs`: pairs of a token and a token that it attends to.
    """

    rows: int
    sampled: int
    context: int
    pairs: int


def decode_work(batch: int, context: int) -> StepWork:
    """Return the work of a decode step of `batch` sequences; each attends to `context` tokens, itself included."""
    return StepWork(rows=batch, sampled=batch, context=batch * context, pairs=batch * context)


def chunk_work(rows: int, cached: int) -> StepWork:
    """Return the work of a prefill chunk of `rows` tokens after `cached` tokens; no token is sampled."""
    return StepWork(rows=rows, sampled=0, context=cached + rows, pairs=rows * cached + rows * (rows + 1) // 2)


def floor_s(config: DecoderSpec, item_bytes: int, token_bytes: int, rates: Rates, work: StepWork) -> float:
    """Return the least seconds of a step with this work at these rates.

    A weight has `item_bytes` bytes; a token's KV in all layers has `token_bytes` bytes.
    """
    heads = (config.heads + config.kv_heads) * config.head_dim
    attention = 2 * config.num_layers * heads
    used = config.hidden_size * (attention + 3 * sum(layer.mlp.active_inner for layer in config.layers))
    read = config.hidden_size * (attention + 3 * sum(_read_inner(layer.mlp, work.rows) for layer in config.layers))
    head = config.hidden_size * config.vocab_size
    pair_flops = 4 * config.num_layers * config.heads * config.head_dim
    return (
        _longer(read * item_bytes, 2 * used * work.rows, rates)
        + (_longer(head * item_bytes, 2 * head * work.sampled, rates) if work.sampled else 0.0)
        + _longer(work.context * token_bytes, pair_flops * work.pairs, rates)
    )


def _read_inner(mlp: DenseMlp | ExpertsMlp, rows: int) -> float:
    """Return the width of an MLP whose weights a step reads; of experts those that are expected to be chosen."""
    if isinstance(mlp, DenseMlp):
        return mlp.inner
    untouched = (1 - mlp.routing.num_chosen / mlp.count) ** rows
    return (1 - untouched) * mlp.count * mlp.inner + mlp.shared_inner


def _longer(num_bytes: float, flops: int, rates: Rates) -> float:
    return max(num_bytes / rates.memory, flops / rates.matrix)
