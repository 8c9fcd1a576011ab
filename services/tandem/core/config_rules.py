"""List the rules of settings that their types cannot express: rules of text, and of several settings together."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from tandem.core.config import Config
from tandem.core.ray_worker_groups import read_groups

_BLOCK_SIZES = frozenset({0, 8, 16, 32, 64, 128, 256})
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")


def violations(config: Config) -> list[tuple[str, str]]:
    """Return the broken rules of a tree as (`section.name`, text that completes the sentence "the value ...")."""
    return [(key, rule) for key, rule, holds in _RULES if not holds(config)]


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


def _has_pair(config: Config) -> bool:
    return min(config.serve.prefill, config.serve.decode) > 0


_RULES: tuple[tuple[str, str, Callable[[Config], bool]], ...] = (
    ("model.id", "must not be empty", lambda c: bool(c.model.id)),
    (
        "model.served_name",
        "must be different names, none of them empty",
        lambda c: all(c.model.served_names) and len(set(c.model.served_names)) == len(c.model.served_names),
    ),
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
        "engine.max_num_batched_tokens",
        "must be at least engine.max_num_seqs, because a step takes every running sequence",
        lambda c: c.engine.max_num_batched_tokens >= c.engine.max_num_seqs,
    ),
    ("engine.max_model_len", "must be 0 (whatever fits) or at least 2", lambda c: c.engine.max_model_len != 1),
    (
        "engine.block_size",
        "must be a power of two from 8 to 256, or 0 (by device)",
        lambda c: c.engine.block_size in _BLOCK_SIZES,
    ),
    (
        "engine.kernels",
        "must be auto on cuda, which has kernels of its own",
        lambda c: c.model.device == "cpu" or c.engine.kernels == "auto",
    ),
    (
        "engine.host_cache_memory",
        "needs engine.enable_prefix_caching",
        lambda c: not c.engine.host_cache_memory or c.engine.enable_prefix_caching,
    ),
    (
        "handoff.transport",
        "cannot be local on cuda, because it reads host memory",
        lambda c: c.model.device == "cpu" or c.handoff.transport != "local",
    ),
    (
        "speculative.ngram_max",
        "must be at least speculative.ngram_min",
        lambda c: c.speculative.ngram_max >= c.speculative.ngram_min,
    ),
    ("worker.id", "must be at most 200 bytes long", lambda c: len(c.worker.id.encode()) <= 200),
    (
        "worker.advertise_address",
        "must be empty or host:port",
        lambda c: not c.worker.advertise_address or _is_endpoint(c.worker.advertise_address),
    ),
    (
        "redis.url",
        f"must start with {', '.join(_REDIS_SCHEMES)}",
        lambda c: not c.redis.url or c.redis.url.startswith(_REDIS_SCHEMES),
    ),
    (
        "redis.url",
        "must name one server, or with +cluster one or more, as host:port",
        lambda c: _names_redis(c.redis.url),
    ),
    ("redis.namespace", "must be letters, digits, '.', '_' or '-'", lambda c: _is_plain(c.redis.namespace)),
    (
        "gateway.grpc_port",
        "must not be -1 where gateway.port is 65535, which has no port after it",
        lambda c: c.gateway.own_grpc_port <= 65535,
    ),
    ("gateway.max_body", "must be more than 0", lambda c: c.gateway.max_body > 0),
    (
        "gateway.disaggregation",
        "cannot be strict without prefill and decode workers",
        lambda c: c.gateway.disaggregation != "strict" or _has_pair(c),
    ),
    (
        "serve.mixed",
        "must be at least 1 unless there are prefill and decode workers",
        lambda c: c.serve.mixed > 0 or _has_pair(c),
    ),
    (
        "planner.max_prefill",
        "must be 0 (any number) or at least planner.min_prefill",
        lambda c: c.planner.max_prefill == 0 or c.planner.max_prefill >= c.planner.min_prefill,
    ),
    (
        "planner.max_decode",
        "must be 0 (any number) or at least planner.min_decode",
        lambda c: c.planner.max_decode == 0 or c.planner.max_decode >= c.planner.min_decode,
    ),
    ("planner.lease", "must not be empty", lambda c: bool(c.planner.lease)),
    (
        "planner.groups",
        "must be empty or name groups by role: prefill=GROUP,decode=GROUP:2",
        lambda c: not c.planner.groups or read_groups(c.planner.groups) is not None,
    ),
)
