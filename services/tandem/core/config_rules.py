"""Check settings against the rules that their types cannot express: formats of text, and conditions on several
settings.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from tandem.core.addresses import is_loopback
from tandem.core.config import Config, EngineConfig
from tandem.core.lane import Lane
from tandem.core.ray_worker_groups import read_groups

_KUBERNETES_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""A DNS subdomain of RFC 1123, which names of most Kubernetes objects must be."""
_HOST_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_]([-a-z0-9_]*[a-z0-9_])?(\.[a-z0-9_]([-a-z0-9_]*[a-z0-9_])?)*")
_NIXL_BACKENDS = ("UCX", "LIBFABRIC")
_BLOCK_SIZES = frozenset({0, 8, 16, 32, 64, 128, 256})
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")


Violation = tuple[str, str]
"""A setting as `section.name`, and text that completes the sentence "the value ..."."""


def violations(config: Config) -> list[Violation]:
    """Return the rules that the settings break, each as a pair (name of the setting, text for people); empty if none is
    broken."""
    return [
        *_model_violations(config),
        *_engine_violations(config),
        *_cache_violations(config.engine),
        *_node_violations(config),
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


def _is_host_pattern(text: str) -> bool:
    if _HOST_PATTERN.fullmatch(text):
        return True
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _model_violations(config: Config) -> Iterator[Violation]:
    model, tensor_parallel = config.model, config.engine.tensor_parallel
    if not model.id:
        yield "model.id", "must not be empty: name a directory, a .gguf file or a hub id"
    if not all(model.served_names) or len(set(model.served_names)) < len(model.served_names):
        yield "model.served_name", "must list different names separated by commas, none of them empty"
    if model.device == "cuda" and model.quantization == "int8":
        rule = "must be none or fp8 where model.device is cuda, because only the CPU kernels compute with int8"
        yield "model.quantization", rule
    if model.device == "cuda" and model.dtype == "float64":
        yield "model.dtype", "must be float32, bfloat16 or float16 where model.device is cuda"
    if model.batch_invariant and tensor_parallel > (2 if model.device == "cuda" else 1):
        rule = f"must be false with engine.tensor_parallel={tensor_parallel}: it supports one rank on a CPU and two on "
        yield "model.batch_invariant", f"{rule}cuda, because a library chooses the order in which more are summed up"


def _engine_violations(config: Config) -> Iterator[Violation]:
    engine, speculative = config.engine, config.speculative
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        rule = f"must be at least engine.max_num_seqs ({engine.max_num_seqs}): raise it, or lower engine.max_num_seqs"
        yield "engine.max_num_batched_tokens", rule
    if engine.max_model_len == 1:
        yield "engine.max_model_len", "must be 0 (whatever fits) or at least 2"
    if engine.block_size not in _BLOCK_SIZES:
        yield "engine.block_size", "must be a power of two from 8 to 256, or 0 for the device's default"
    if config.model.device == "cuda" and engine.kernels != "auto":
        yield "engine.kernels", "must be auto where model.device is cuda, which always uses Triton kernels"
    if config.model.device == "cuda" and config.transfer.backend == "local":
        yield "transfer.backend", "must not be local where model.device is cuda, because local reads host memory only"
    if not set(config.transfer.nixl_backend_names) <= set(_NIXL_BACKENDS):
        yield "transfer.nixl_backends", f"must be one of {', '.join(_NIXL_BACKENDS)}, or several separated by commas"
    if speculative.ngram_max < speculative.ngram_min:
        yield "speculative.ngram_max", f"must be at least speculative.ngram_min ({speculative.ngram_min})"


def _cache_violations(engine: EngineConfig) -> Iterator[Violation]:
    if engine.host_cache_memory and not engine.enable_prefix_caching:
        yield "engine.host_cache_memory", "must be 0 while engine.enable_prefix_caching is false"
    if engine.file_cache_path and not engine.enable_prefix_caching:
        yield "engine.file_cache_path", "must be empty while engine.enable_prefix_caching is false"
    if engine.file_cache_path and engine.tensor_parallel > 1:
        yield "engine.file_cache_path", "must be empty where engine.tensor_parallel is not 1"


def _node_violations(config: Config) -> Iterator[Violation]:
    engine = config.engine
    if engine.tensor_parallel % engine.nnodes:
        yield "engine.nnodes", f"must divide engine.tensor_parallel ({engine.tensor_parallel}) without a rest"
    if engine.node_rank >= engine.nnodes:
        yield "engine.node_rank", f"must be less than engine.nnodes ({engine.nnodes}), because the first machine is 0"
    if engine.node_rank and not engine.master_addr:
        yield "engine.master_addr", "must name machine 0 where engine.node_rank is more than 0"
    is_far = bool(engine.master_addr) and not is_loopback(engine.master_addr)
    if engine.nnodes > 1 and is_far and is_loopback(config.worker.host):
        yield "worker.host", "must be an address that the worker's other machines reach, as engine.master_addr is"
    if engine.nnodes > 1 and config.transfer.backend == "local":
        yield "transfer.backend", "must not be local where engine.nnodes is more than 1"


def _worker_violations(config: Config) -> Iterator[Violation]:
    worker = config.worker
    if len(worker.id.encode()) > 200:
        yield "worker.id", "must be at most 200 bytes long"
    labels = [label.strip() for label in worker.lanes.split(",")] if worker.lanes else []
    known = [lane.label for lane in Lane]
    if len(set(labels)) < len(labels) or not set(known).issuperset(labels):
        yield "worker.lanes", f"must list different lanes separated by commas, of {', '.join(known)}"
    if worker.advertise_address and not _is_endpoint(worker.advertise_address):
        yield "worker.advertise_address", "must be empty or host:port, with a port up to 65535"


def _redis_violations(config: Config) -> Iterator[Violation]:
    redis = config.redis
    if redis.url and not redis.url.startswith(_REDIS_SCHEMES):
        yield "redis.url", f"must start with {', '.join(_REDIS_SCHEMES[:-1])} or {_REDIS_SCHEMES[-1]}"
    if not _names_redis(redis.url):
        schemes = "redis+cluster:// or rediss+cluster://"
        yield "redis.url", f"must name one server as host:port, or several separated by commas with {schemes}"
    if not _is_plain(redis.namespace):
        yield "redis.namespace", "must be one or more letters, digits, '.', '_' or '-'"


def _gateway_violations(config: Config) -> Iterator[Violation]:
    gateway, has_pair = config.gateway, min(config.serve.prefill, config.serve.decode) > 0
    if gateway.own_grpc_port > 65535:
        yield "gateway.grpc_port", "must be a port, because gateway.port is 65535 and has no port after it"
    if not all(map(_is_host_pattern, gateway.host_patterns)):
        rule = "must be empty, or list host names, addresses and patterns such as *.example.com without ports"
        yield "gateway.allowed_hosts", rule
    if not gateway.max_body:
        yield "gateway.max_body", "must be more than 0"
    if gateway.disaggregation == "strict" and not has_pair:
        yield "gateway.disaggregation", "must not be strict while serve.prefill or serve.decode is 0"
    if not config.serve.mixed and not has_pair:
        why = "because nothing could serve a whole request"
        yield "serve.mixed", f"must be at least 1 while serve.prefill or serve.decode is 0, {why}"


def _planner_violations(config: Config) -> Iterator[Violation]:
    planner = config.planner
    if 0 < planner.max_prefill < planner.min_prefill:
        yield "planner.max_prefill", f"must be 0 for no limit, or at least planner.min_prefill ({planner.min_prefill})"
    if 0 < planner.max_decode < planner.min_decode:
        yield "planner.max_decode", f"must be 0 for no limit, or at least planner.min_decode ({planner.min_decode})"
    if len(planner.lease) > 253 or not _KUBERNETES_NAME.fullmatch(planner.lease):
        rule = "must be a name of a Kubernetes object: lower-case letters, digits, '-' and '.', at most 253"
        yield "planner.lease", rule
    if planner.groups and read_groups(planner.groups) is None:
        yield (
            "planner.groups",
            (
                "must be empty or name groups by role, as prefill=GROUP,decode=GROUP:2+1. GROUP:2 has two workers in a "
                "pod, GROUP/2 two pods for a worker (not both), and +1 is a spare pod"
            ),
        )
