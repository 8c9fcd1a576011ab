"""Define the validity rules of settings and list the violations of a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from tandem.core.config import Config, SloConfig, value_of
from tandem.core.ray_worker_groups import read_groups


@dataclass(frozen=True, slots=True)
class Violation:
    """A setting whose value breaks a rule. `key` is `section.name`; `rule` completes the sentence "the value ..."."""

    key: str
    rule: str


def violations(config: Config) -> tuple[Violation, ...]:
    """Return the broken rules of a tree whose values have the right types; empty when the tree is valid."""
    return tuple(Violation(key, rule) for key, rule, holds in _RULES if not holds(config))


_Rule = tuple[str, str, Callable[[Config], bool]]

_BLOCK_SIZES = frozenset({0, 8, 16, 32, 64, 128, 256})
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")


def _each(rule: str, test: Callable[[Any], bool], *keys: str) -> list[_Rule]:
    return [_one(key, rule, test) for key in keys]


def _one(key: str, rule: str, test: Callable[[Any], bool]) -> _Rule:
    return (key, rule, lambda config: test(value_of(config, key)))


def _is_plain(name: str) -> bool:
    """Return whether `name` is safe inside a Redis key, where braces and colons have a meaning."""
    return bool(name) and all(letter.isascii() and (letter.isalnum() or letter in "._-") for letter in name)


def _names_redis(url: str) -> bool:
    """Return whether the URL has valid ports and as many hosts as its scheme allows: one, or any number for a
    cluster."""
    try:
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2].split(",")
        ports = [urlsplit(f"//{host}").port for host in hosts]
    except ValueError:
        return False
    return len(ports) == 1 or parts.scheme.endswith("+cluster")


def _is_endpoint(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and int(port) <= 65535


def _bounds(role: str) -> _Rule:
    def holds(config: Config) -> bool:
        least, most = (value_of(config, f"planner.{end}_{role}") for end in ("min", "max"))
        return bool(most == 0 or most >= least)

    return (f"planner.max_{role}", f"must be 0 (any number) or at least planner.min_{role}", holds)


def _has_pair(config: Config) -> bool:
    return min(config.serve.prefill, config.serve.decode) > 0


_RULES: tuple[_Rule, ...] = (
    _one("model.id", "must not be empty", bool),
    (
        "model.served_name",
        "must be different names, none of them empty",
        lambda c: all(c.model.served_names) and len(set(c.model.served_names)) == len(c.model.served_names),
    ),
    _one("engine.max_num_seqs", "must be at least 1", lambda v: v >= 1),
    (
        "engine.max_num_batched_tokens",
        "must be at least engine.max_num_seqs, because a step takes every running sequence",
        lambda c: c.engine.max_num_batched_tokens >= max(1, c.engine.max_num_seqs),
    ),
    _one("engine.max_model_len", "must be 0 (whatever fits) or at least 2", lambda v: v == 0 or v >= 2),
    _one("engine.tensor_parallel", "must be at least 1", lambda v: v >= 1),
    _one("engine.block_size", "must be a power of two from 8 to 256, or 0 (by device)", _BLOCK_SIZES.__contains__),
    _one("engine.gpu_memory_utilization", "must be more than 0 and at most 1", lambda v: 0 < v <= 1),
    (
        "model.quantization",
        "cannot be int8 on cuda: its products are the CPU kernels'",
        lambda c: c.model.device == "cpu" or c.model.quantization == "none",
    ),
    (
        "model.dtype",
        "cannot be float64 on cuda, whose kernels take float32 and half types",
        lambda c: c.model.device == "cpu" or c.model.dtype != "float64",
    ),
    (
        "model.batch_invariant",
        "takes one rank on a CPU, whose compiled kernels compute whole models, and at most two on cuda: the order in "
        "which more are summed up is a library's",
        lambda c: not c.model.batch_invariant or c.engine.tensor_parallel <= (2 if c.model.device == "cuda" else 1),
    ),
    (
        "engine.kernels",
        "must be auto on cuda, which has kernels of its own",
        lambda c: c.model.device == "cpu" or c.engine.kernels == "auto",
    ),
    (
        "handoff.transport",
        "cannot be local on cuda, because it reads host memory",
        lambda c: c.model.device == "cpu" or c.handoff.transport != "local",
    ),
    *_each("must not be negative", lambda v: v >= 0, *(f"slo.{one.name}" for one in fields(SloConfig))),
    *_each("must be at least 1", lambda v: v >= 1, "speculative.num_tokens", "speculative.max_batch_tokens"),
    _one("speculative.ngram_min", "must be at least 1", lambda v: v >= 1),
    (
        "speculative.ngram_max",
        "must be at least speculative.ngram_min",
        lambda c: c.speculative.ngram_max >= c.speculative.ngram_min,
    ),
    _one("redis.url", f"must start with {', '.join(_REDIS_SCHEMES)}", lambda v: not v or v.startswith(_REDIS_SCHEMES)),
    _one("redis.url", "must name one server, or with +cluster one or more, as host:port", _names_redis),
    _one("worker.id", "must be at most 200 bytes long", lambda v: len(v.encode()) <= 200),
    _one("redis.index_stride", "must be between 1 and 64", lambda v: 1 <= v <= 64),
    _one("redis.namespace", "must be letters, digits, '.', '_' or '-'", _is_plain),
    *_each("must be between 0 and 65535", lambda v: 0 <= v <= 65535, "worker.port", "gateway.port"),
    _one("worker.metrics_port", "must be between -1 and 65535", lambda v: -1 <= v <= 65535),
    _one("telemetry.max_values", "must be at least 1", lambda v: v >= 1),
    (
        "gateway.grpc_port",
        "must be between 0 and 65535, or -1 where gateway.port is less than 65535",
        lambda c: -1 <= c.gateway.grpc_port <= 65535 and c.gateway.own_grpc_port <= 65535,
    ),
    _one("gateway.max_body", "must be more than 0", lambda v: v > 0),
    _one("engine.kv_cache_memory", "must not be negative", lambda v: v >= 0),
    *_each("must be more than 0", lambda v: v > 0, "handoff.lease_s", "handoff.pull_timeout_s"),
    *_each("must be more than 0", lambda v: v > 0, "handoff.drain_timeout_s", "worker.step_stall_s"),
    _one("transfer.min_gbps", "must not be negative", lambda v: v >= 0),
    *_each("must be more than 0", lambda v: v > 0, "planner.interval_s", "planner.window_s", "planner.start_s"),
    _one("planner.percentile", "must be at least 50 and less than 100", lambda v: 50 <= v < 100),
    _one("planner.headroom", "must be at least 0 and less than 1", lambda v: 0 <= v < 1),
    _one("planner.scale_down_s", "must not be negative", lambda v: v >= 0),
    *_each("must not be negative", lambda v: v >= 0, "planner.min_prefill", "planner.min_decode"),
    _bounds("prefill"),
    _bounds("decode"),
    _one("planner.metrics_port", "must be between -1 and 65535", lambda v: -1 <= v <= 65535),
    _one("planner.lease_s", "must be at least 3", lambda v: v >= 3),
    _one("planner.lease", "must not be empty", bool),
    _one(
        "planner.groups",
        "must be empty or name groups by role: prefill=GROUP,decode=GROUP:2",
        lambda v: not v or read_groups(v) is not None,
    ),
    _one("worker.advertise_address", "must be empty or host:port", lambda v: not v or _is_endpoint(v)),
    _one("gateway.heartbeat_s", "must be more than 0", lambda v: v > 0),
    *_each("must be more than 0", lambda v: v > 0, "gateway.queue_timeout_s", "gateway.progress_timeout_s"),
    *_each("must not be negative", lambda v: v >= 0, "gateway.no_worker_wait_s", "gateway.max_retries"),
    *_each("must be more than 0", lambda v: v > 0, "gateway.request_timeout_s", "gateway.stalled_client_s"),
    _one("gateway.max_connections", "must be at least 1", lambda v: v >= 1),
    _one("gateway.worker_timeout_s", "must be at least 3, because workers report once per second", lambda v: v >= 3),
    _one("gateway.max_queued", "must be at least 1, because every request begins in the queue", lambda v: v >= 1),
    _one("engine.plan_depth", "must be 0 (by device), 1 or 2", (0, 1, 2).__contains__),
    *_each("must not be negative", lambda v: v >= 0, "engine.num_threads", "engine.host_cache_memory"),
    (
        "engine.host_cache_memory",
        "needs engine.enable_prefix_caching",
        lambda c: not c.engine.host_cache_memory or c.engine.enable_prefix_caching,
    ),
    *_each("must not be negative", lambda v: v >= 0, "worker.drain_s", "gateway.drain_s", "worker.gateway_grace_s"),
    _one("worker.queue_horizon_ms", "must not be negative", lambda v: v >= 0),
    *_each("must not be negative", lambda v: v >= 0, "serve.prefill", "serve.decode", "serve.mixed"),
    (
        "serve.mixed",
        "must be at least 1 unless there are prefill and decode workers",
        lambda c: c.serve.mixed > 0 or _has_pair(c),
    ),
    (
        "gateway.disaggregation",
        "cannot be strict without prefill and decode workers",
        lambda c: c.gateway.disaggregation != "strict" or _has_pair(c),
    ),
)
