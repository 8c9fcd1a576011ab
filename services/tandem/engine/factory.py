"""Build the engine that a configuration describes, for a real or simulated executor."""

from __future__ import annotations

from dataclasses import replace

from tandem.core.config import Config, SpeculativeConfig
from tandem.core.device_defaults import with_device_defaults
from tandem.engine.engine import Engine
from tandem.engine.ports import Executor
from tandem.kv.block_pool import BlockPool
from tandem.sched.phases.spec_decode import Speculation
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.ngram_proposer import NgramProposer
from tandem.sched.state.slo_targets import LatencyTargets


def engine_limits(config: Config, max_model_len: int) -> SchedulerLimits:
    """Return the scheduler's limits that follow from the settings. `max_model_len`: most prompt and output tokens of a
    request. The limit `vocab_size` is left at its default."""
    engine = config.engine
    return SchedulerLimits(
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=max_model_len,
        enable_chunked_prefill=engine.enable_chunked_prefill,
        digest_handoffs=config.handoff.digests,
        targets=LatencyTargets.of(config.slo),
        batch_max_share=config.lanes.batch_max_share,
        max_lane_preemptions=config.lanes.max_preemptions,
        max_lane_pause_s=config.lanes.max_pause_s,
        queue_horizon_s=config.worker.queue_horizon_ms / 1e3,
    )


def build_engine(
    config: Config, executor: Executor, model_fingerprint: str, max_model_len: int, *, records_facts: bool = False
) -> Engine:
    """Build the engine of one worker from the settings; block size, number of blocks and vocabulary are those of
    `executor`.

    `model_fingerprint`: becomes part of the block hashes. `max_model_len`: most prompt and output tokens of a request.
    `records_facts`: record which blocks are stored, offloaded and evicted, for a caller that regularly calls
    `Engine.take_events`.
    """
    engine = config.engine
    pool = BlockPool(
        executor.num_blocks,
        executor.layout.block_size,
        enable_prefix_caching=engine.enable_prefix_caching,
        num_host_slots=executor.num_host_slots if engine.enable_prefix_caching else 0,
        records_facts=records_facts,
        keeps_files=bool(engine.file_cache_path),
        max_retained_blocks=int(engine.max_retained_fraction * executor.num_blocks),
    )
    limits = replace(engine_limits(config, max_model_len), vocab_size=executor.vocab_size)
    return Engine(
        pool,
        limits,
        config.handoff,
        model_fingerprint,
        block_bytes=executor.layout.block_bytes,
        plan_depth=with_device_defaults(config).engine.plan_depth,
        speculation=_speculation(config.speculative),
    )


def _speculation(config: SpeculativeConfig) -> Speculation | None:
    if config.method == "off":
        return None
    return Speculation(
        lambda: NgramProposer(config.ngram_min, config.ngram_max),
        num_tokens=config.num_tokens,
        max_batch_tokens=config.max_batch_tokens,
    )
