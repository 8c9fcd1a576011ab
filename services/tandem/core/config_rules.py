"""Check settings against the rules that their types cannot express: formats of text, and conditions on several
settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from tandem.core.config import Config
from tandem.core.ray_worker_groups import read_groups

_KUBERNETES_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""A DNS subdomain of RFC 1123, which names of most Kubernetes objects must be."""
_BLOCK_SIZES = frozenset({0, 8, 16, 32, 64, 128, 256})
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")


Violation = tuple[str, str]
"""A setting as `section.name`, and text that completes the sentence "the value ..."."""


def violations(config: Config) -> list[Violation]:
    """Return every rule that the settings break, with the name of the setting and a text for people; empty if none is
    broken.
    """
    return [
        *_model_violations(config),
        *_engine_violations(config),
        *_worker_violations(config),
        *_redis_violations(config),
        *_gateway_violations(config),
        *_planner_violations(config),
    ]


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


def _model_violations(config: Config) -> Iterator[Violation]:
    model, tensor_parallel = config.model, config.engine.tensor_parallel
    if not model.id:
        yield "model.id", "must not be empty"
    if not all(model.served_names) or len(set(model.served_names)) < len(model.served_names):
        yield "model.served_name", "must be different names, none of them empty"
    if model.device == "cuda" and model.quantization != "none":
        yield "model.quantization", "cannot be int8 on cuda: its products are the CPU kernels'"
    if model.device == "cuda" and model.dtype == "float64":
        yield "model.dtype", "cannot be float64 on cuda, whose kernels take float32 and half types"
    if model.batch_invariant and tensor_parallel > (2 if model.device == "cuda" else 1):
        rule = "takes one rank on a CPU, whose compiled kernels compute whole models, and at most two on cuda: the "
        yield "model.batch_invariant", f"{rule}order in which more are summed up is a library's"


def _engine_violations(config: Config) -> Iterator[Violation]:
    engine, speculative = config.engine, config.speculative
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        rule = "must be at least engine.max_num_seqs, because a step takes every running sequence"
        yield "engine.max_num_batched_tokens", rule
    if engine.max_model_len == 1:
        yield "engine.max_model_len", "must be 0 (whatever fits) or at least 2"
    if engine.block_size not in _BLOCK_SIZES:
        yield "engine.block_size", "must be a power of two from 8 to 256, or 0 (by device)"
    if config.model.device == "cuda" and engine.kernels != "auto":
        yield "engine.kernels", "must be auto on cuda, which has kernels of its own"
    if engine.host_cache_memory and not engine.enable_prefix_caching:
        yield "engine.host_cache_memory", "needs engine.enable_prefix_caching"
    if config.model.device == "cuda" and config.handoff.transport == "local":
        yield "handoff.transport", "cannot be local on cuda, because it reads host memory"
    if speculative.ngram_max < speculative.ngram_min:
        yield "speculative.ngram_max", "must be at least speculative.ngram_min"


def _worker_violations(config: Config) -> Iterator[Violation]:
    worker = config.worker
    if len(worker.id.encode()) > 200:
        yield "worker.id", "must be at most 200 bytes long"
    if worker.advertise_address and not _is_endpoint(worker.advertise_address):
        yield "worker.advertise_address", "must be empty or host:port"


def _redis_violations(config: Config) -> Iterator[Violation]:
    redis = config.redis
    if redis.url and not redis.url.startswith(_REDIS_SCHEMES):
        yield "redis.url", f"must start with {', '.join(_REDIS_SCHEMES)}"
    if not _names_redis(redis.url):
        yield "redis.url", "must name one server, or with +cluster one or more, as host:port"
    if not _is_plain(redis.namespace):
        yield "redis.namespace", "must be letters, digits, '.', '_' or '-'"


def _gateway_violations(config: Config) -> Iterator[Violation]:
    gateway, has_pair = config.gateway, min(config.serve.prefill, config.serve.decode) > 0
    if gateway.own_grpc_port > 65535:
        yield "gateway.grpc_port", "must not be -1 where gateway.port is 65535, which has no port after it"
    if not gateway.max_body:
        yield "gateway.max_body", "must be more than 0"
    if gateway.disaggregation == "strict" and not has_pair:
        yield "gateway.disaggregation", "cannot be strict without prefill and decode workers"
    if not config.serve.mixed and not has_pair:
        yield "serve.mixed", "must be at least 1 unless there are prefill and decode workers"


def _planner_violations(config: Config) -> Iterator[Violation]:
    planner = config.planner
    if 0 < planner.max_prefill < planner.min_prefill:
        yield "planner.max_prefill", "must be 0 (any number) or at least planner.min_prefill"
    if 0 < planner.max_decode < planner.min_decode:
        yield "planner.max_decode", "must be 0 (any number) or at least planner.min_decode"
    if len(planner.lease) > 253 or not _KUBERNETES_NAME.fullmatch(planner.lease):
        rule = "must be a name of a Kubernetes object: lower-case letters, digits, '-' and '.', at most 253"
        yield "planner.lease", rule
    if planner.groups and read_groups(planner.groups) is None:
        yield "planner.groups", "must be empty or name groups by role: prefill=GROUP,decode=GROUP:2"
