"""Define the tree of all settings as frozen dataclasses: the type, range, description and default of each setting.

`tandem.core.settings` builds the tree from files, environment and flags. It refuses values outside the ranges, and
those that break a rule of `tandem.core.config_rules`. A program hands each room its section.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from sys import float_info
from typing import Annotated, Any, Literal

from msgspec import Meta

MAX_FLOAT = float_info.max
"""The bound of settings that may be any finite number: infinity is greater, and NaN is in no range."""

Count = Annotated[int, Meta(ge=0)]
PositiveCount = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
OptionalPort = Annotated[int, Meta(ge=-1, le=65535)]
NonNegative = Annotated[float, Meta(ge=0, le=MAX_FLOAT)]
Positive = Annotated[float, Meta(gt=0, le=MAX_FLOAT)]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class Bytes(int):
    """A size in bytes; written `512MiB`, `2GiB` or a plain number of bytes."""

    @classmethod
    def parse(cls, text: str | int) -> Bytes:
        raw = str(text).strip().lower().removesuffix("b").rstrip()
        number = raw.rstrip("kmgti").rstrip()
        unit = raw[len(number) :].strip()
        unit = unit + "b" if unit.endswith("i") else unit
        if unit not in _UNITS or not number.isascii() or not number.replace(".", "", 1).isdigit():
            raise ValueError(f"not a size: {text!r} (write 512MiB, 2GiB or a number of bytes)")
        whole, _, fraction = number.partition(".")
        return cls(int(whole or 0) * _UNITS[unit] + int(float(f"0.{fraction or 0}") * _UNITS[unit]))

    def __str__(self) -> str:
        for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if self and self % factor == 0:
                return f"{self // factor}{unit}"
        return int.__repr__(self)


def _doc(text: str, default: Any) -> Any:
    return field(default=default, metadata={"doc": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    id: str = _doc(
        "alias, directory, .gguf file, hub id, or random: followed by the name of a published model",
        "smollm2-135m-instruct",
    )
    served_name: str = _doc(
        "model name for clients, or several separated by commas; empty: the last part of model.id", ""
    )
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = _doc(
        "data type of weights, activations and KV; auto: float32 on a CPU, bfloat16 on a GPU", "auto"
    )
    quantization: Literal["none", "int8"] = _doc(
        "quantization of weights; int8 computes in float32 with 8-bit products", "none"
    )
    batch_invariant: bool = _doc(
        "make a token's result bitwise independent of the rest of the batch and of the prefill chunking; slower on a "
        "GPU, free on a CPU, whose compiled kernels always compute so",
        False,
    )
    compact: bool = _doc("store weights in fewer bits where that is lossless (compiled kernels)", True)
    device: Literal["cpu", "cuda"] = _doc("where the model runs", "cpu")
    generation_config: Literal["auto", "none"] = _doc("none: ignore the model's own sampling defaults", "auto")
    cache_dir: str = _doc("directory of imported models; empty: $XDG_CACHE_HOME/tandem/models", "")

    @property
    def served_names(self) -> tuple[str, ...]:
        """Return the names that clients may use: those of `served_name`, else the last part of `id`."""
        if not self.served_name:
            return (PurePath(self.id).name.removesuffix(".gguf"),)
        return tuple(name.strip() for name in self.served_name.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    max_num_batched_tokens: PositiveCount = _doc("token budget of one step", 512)
    max_num_seqs: PositiveCount = _doc("sequences that may run at once", 64)
    max_model_len: Count = _doc(
        "most prompt and output tokens of one request; 0: what the model and the KV pool allow", 0
    )
    block_size: Count = _doc("tokens per KV block; 0: 16 on a CPU, 64 on a GPU", 0)
    tensor_parallel: PositiveCount = _doc(
        "tensor-parallel ranks of one worker, each in a process and on a device of its own", 1
    )
    enable_chunked_prefill: bool = _doc(
        "compute prompts in chunks; off: each prompt in one step, whatever the budget", True
    )
    enable_prefix_caching: bool = _doc("reuse the KV of equal prefixes", True)
    kv_cache_memory: Bytes = _doc(
        "size of the KV pool of each rank; 0: 1GiB on a CPU, on a GPU what gpu_memory_utilization leaves", Bytes(0)
    )
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = _doc(
        "fraction of a GPU's memory for all workers on it, KV pools included; `serve` divides it among them",
        0.9,
    )
    kv_cache_dtype: Literal["auto", "float8_e4m3fn"] = _doc(
        "data type of KV; auto: model.dtype; float8: one byte a value, with a scale per token, head and plane",
        "auto",
    )
    host_cache_memory: Bytes = _doc(
        "host memory for KV blocks evicted from the pool; 0: none. Worth it where GPU memory is scarce: on a CPU it is "
        "the same memory as the pool's, plus copies",
        Bytes(0),
    )
    cuda_graphs: bool = _doc("on a GPU, capture decode-only steps once per batch size and replay them", True)
    plan_depth: Annotated[int, Meta(ge=0, le=2)] = _doc(
        "steps planned ahead and not finished: with 2 the next is planned while a GPU computes; 0: by device",
        0,
    )
    num_threads: Count = _doc("compute threads of one worker; 0: the cores divided by the workers", 0)
    kernels: Literal["auto", "compiled", "reference"] = _doc(
        "auto on a CPU: compiled where a C++ compiler, dtype and sizes allow, else plain torch; on a GPU: Triton",
        "auto",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    method: Literal["off", "ngram"] = _doc(
        "ngram: draft the tokens that followed the same n-gram earlier in the sequence; the output stays the same",
        "off",
    )
    num_tokens: PositiveCount = _doc("most draft tokens of one sequence in a step", 8)
    max_batch_tokens: PositiveCount = _doc(
        "most running sequences and draft tokens in one step; with more sequences than this nothing is drafted", 16
    )
    ngram_min: PositiveCount = _doc("shortest n-gram whose earlier occurrence gives a draft", 2)
    ngram_max: PositiveCount = _doc("longest n-gram compared to choose among several earlier occurrences", 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """Latency targets in milliseconds for each lane; 0 means no target. `ttft_ms` and `itl_ms` are the interactive
    lane's."""

    ttft_ms: NonNegative = _doc(
        "time to first token, interactive lane; a prompt about to miss it goes ahead of shorter ones", 0.0
    )
    itl_ms: NonNegative = _doc("time between two tokens, interactive lane; prefill chunks shrink to fit it", 0.0)
    standard_ttft_ms: NonNegative = _doc("time to first token, standard lane", 0.0)
    standard_itl_ms: NonNegative = _doc("time between two tokens, standard lane", 0.0)
    batch_ttft_ms: NonNegative = _doc("time to first token, batch lane", 0.0)
    batch_itl_ms: NonNegative = _doc("time between two tokens, batch lane", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    transport: Literal["nixl", "local"] = _doc("how KV blocks move between workers", "nixl")
    lease_s: Positive = _doc("how long a producer keeps offered KV without a renewal", 10.0)
    pull_timeout_s: Positive = _doc(
        "a pull fails when neither KV nor a message of its source arrives for this long", 30.0
    )
    drain_timeout_s: Positive = _doc("a read that does not end for this long costs the connection to that worker", 10.0)
    digests: bool = _doc("check every block that was read; off is for measuring only", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Requirements on the link between two workers. Some pairs are measured when the workers connect, others from their
    first transfers."""

    require: Literal["any", "rdma", "cuda_ipc", "shared_memory"] = _doc(
        "transport that KV must use: rdma is required between machines, cuda_ipc and shared_memory within one", "any"
    )
    min_gbps: NonNegative = _doc("gigabytes per second that a link must reach in a bandwidth probe; 0: any", 0.0)
    on_slow_link: Literal["refuse", "warn"] = _doc(
        "refuse: hand-offs avoid a pair of workers whose link is known to miss the requirements: a few pairs of each "
        "worker are probed before use, others are judged once reads of 1 MiB and more add up to 16 MiB; remote prefix "
        "fetches are exempt. warn: hand-offs use the pair, and logs and metrics report it",
        "refuse",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    pool: Literal["prefill", "decode", "mixed"] = _doc("role of the worker, which routers read", "mixed")
    id: str = _doc("stable name of the worker; empty: host and process id", "")
    host: str = _doc(
        "address to bind and advertise; for 0.0.0.0 and :: it advertises $POD_IP, else an address of its machine",
        "127.0.0.1",
    )
    host_label: str = _doc("label of the worker's machine; KV moves fastest between workers of one machine", "")
    rack: str = _doc("label of the worker's rack", "")
    zone: str = _doc("label of the worker's zone", "")
    port: Port = _doc("gRPC port; 0: any free one", 0)
    advertise_address: str = _doc(
        "host:port at which others reach the worker, behind a proxy or NAT; port 0: the port it listens at; empty: "
        "the address it listens at",
        "",
    )
    drain_s: NonNegative = _doc("how long running work may take to migrate or end after SIGTERM", 20.0)
    gateway_grace_s: NonNegative = _doc("how long jobs live on after their gateway's stream is gone", 10.0)
    step_stall_s: Positive = _doc(
        "a step longer than this (and than 20 times its prediction) makes the worker unhealthy", 30.0
    )
    queue_horizon_ms: NonNegative = _doc(
        "predicted prefill accepted beside the longest prompt of each size; the rest waits in gateways; 0: two steps",
        0.0,
    )
    step_log: str = _doc("directory for one append-only log of steps per process; empty: none", "")
    run_dir: str = _doc("directory of the file by which `tandem drain --local` finds the worker; empty: none", "")
    metrics_port: OptionalPort = _doc(
        "port of the worker's own /metrics; 0: any free one, which gateways list; -1: none", 0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    host: str = _doc("address to bind", "127.0.0.1")
    port: Port = _doc("HTTP port; 0: any free one", 8000)
    grpc_port: OptionalPort = _doc(
        "gRPC port; 0: any free one; -1: the one after port, any free one where that is 0", -1
    )
    auth: Literal["keys", "off"] = _doc(
        "keys: requests without an API key are refused; off: everybody is served", "keys"
    )
    tenants: str = _doc("YAML file of tenants and the hashes of their API keys; reloaded when it changes", "")
    disaggregation: Literal["off", "auto", "prefer", "strict"] = _doc(
        "off: never split; auto: split where it costs less; prefer: split while both pools have workers; strict: "
        "split or refuse",
        "prefer",
    )
    routing_policy: Literal["cost", "random", "round_robin", "least_loaded", "prefix"] = _doc(
        "how workers are chosen; all but cost are baselines for comparison", "cost"
    )
    remote_prefix: bool = _doc(
        "fetch a prompt's prefix from another worker's cache where that costs less than computing it", True
    )
    max_body: Bytes = _doc("largest request body or gRPC message", Bytes(4 << 20))
    request_timeout_s: Positive = _doc("a request that has not arrived completely after this long is refused", 60.0)
    stalled_client_s: Positive = _doc("a client that reads nothing of its response for this long is disconnected", 60.0)
    max_connections: PositiveCount = _doc(
        "HTTP connections, and gRPC calls, at once; beyond that only probes are answered", 4096
    )
    queue_timeout_s: Positive = _doc("a request that finds no worker with capacity for this long is refused", 120.0)
    no_worker_wait_s: NonNegative = _doc("the same limit while no suitable worker is alive, as after a crash", 30.0)
    max_retries: Count = _doc("failed attempts in a row without a new token that a request survives", 4)
    # Four times the timeout between workers, so that they report a failure first and a long prompt has enough time.
    progress_timeout_s: Positive = _doc("an attempt fails when its workers make no progress for this long", 120.0)
    drain_s: NonNegative = _doc("how long requests in flight may take after SIGTERM", 20.0)
    worker_timeout_s: Annotated[float, Meta(ge=3, le=MAX_FLOAT)] = _doc(
        "a worker whose stream carries nothing for this long is lost", 10.0
    )
    heartbeat_s: Positive = _doc("how often a stream without a first token yet sends a comment", 10.0)
    max_queued: PositiveCount = _doc(
        "requests that may wait for a worker; beyond that the tenant with most of them loses one", 1024
    )
    early_rejection: Literal["on", "off"] = _doc(
        "refuse at once a request predicted to miss its lane's slo or its client's deadline", "on"
    )
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = _doc(
        "how the model writes tool calls; auto: detected from its chat template or vocabulary", "auto"
    )
    console: bool = _doc("serve the console at /console; with auth=keys it requires an API key", True)
    reasoning_parser: Literal["auto", "think", "none"] = _doc(
        "whether text in <think> is reasoning; auto: if the model's template or vocabulary has that tag", "auto"
    )

    @property
    def own_grpc_port(self) -> int:
        """Return the gRPC port with -1 resolved to the port after `port`; 0 means any free port."""
        if self.grpc_port >= 0:
            return self.grpc_port
        return self.port + 1 if self.port else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Logs and metrics of every program. OpenTelemetry's own `OTEL_*` variables choose where traces and metrics are
    sent; without them nothing is sent."""

    log_format: Literal["text", "json"] = _doc("lines for people, or one JSON object per line", "text")
    log_level: Literal["debug", "info", "warning", "error"] = _doc("lowest level that is logged", "info")
    log_requests: Literal["off", "failed", "all"] = _doc(
        "which ended requests the gateway logs, one line each", "failed"
    )
    max_values: PositiveCount = _doc(
        "tenants, models and workers with metric labels of their own; the rest is 'other'", 100
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    url: str = _doc(
        "redis://, rediss:// or unix://; redis+cluster:// or rediss+cluster:// with nodes separated by commas; "
        "empty: an embedded server where `serve` starts one",
        "",
    )
    namespace: str = _doc("prefix of every Redis key", "tandem")
    index_stride: Annotated[int, Meta(ge=1, le=64)] = _doc(
        "publish every n-th block of a prompt to the prefix index; the same in gateways and workers", 1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How gateways and workers authenticate each other; must be the same for all of them."""

    secret_file: str = _doc(
        "file with one secret of 32 bytes or more per line: the first signs, a second is accepted", ""
    )
    insecure: bool = _doc("let a worker without a secret or TLS listen on a non-loopback address", False)
    tls_cert_file: str = _doc(
        "PEM certificate for the name tandem-cluster; with all three files, gateways and workers use TLS", ""
    )
    tls_key_file: str = _doc("PEM private key of tls_cert_file", "")
    tls_ca_file: str = _doc("PEM certificates of the trusted CA", "")

    @property
    def has_tls(self) -> bool:
        return bool(self.tls_cert_file or self.tls_key_file or self.tls_ca_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    prefill: Count = _doc("prefill workers", 1)
    decode: Count = _doc("decode workers", 1)
    mixed: Count = _doc("mixed workers", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """How many workers of each role there should be to keep the targets of `slo`, and where the planner starts them."""

    mode: Literal["explain", "act"] = _doc("explain: decide and say why, change nothing", "explain")
    actuator: Literal["serve", "raycluster"] = _doc(
        "serve: set the targets of Serve's autoscaling policy, and Ray's autoscaler adds pods; raycluster: also set "
        "the pods of a RayCluster whose own autoscaler is off",
        "serve",
    )
    model: str = _doc("model whose workers are planned; empty: the one that the workers serve", "")
    interval_s: Positive = _doc("time between two decisions", 5.0)
    window_s: Positive = _doc("length of the demand history that a forecast uses", 300.0)
    start_s: Positive = _doc("how long a new worker takes until it serves; the forecast's horizon", 60.0)
    percentile: Annotated[float, Meta(ge=50, lt=100)] = _doc(
        "percentage of requests that are to meet the targets", 99.0
    )
    headroom: Annotated[float, Meta(ge=0, lt=1)] = _doc(
        "fraction of the capacity kept free beyond the forecast demand", 0.15
    )
    scale_down_s: NonNegative = _doc("how long fewer workers must have been enough before some are removed", 300.0)
    change_roles: bool = _doc("change the role of a worker instead of starting one, where that is enough", True)
    min_prefill: Count = _doc("fewest prefill workers", 1)
    max_prefill: Count = _doc("most prefill workers; 0: any number", 0)
    min_decode: Count = _doc("fewest decode workers", 1)
    max_decode: Count = _doc("most decode workers; 0: any number", 0)
    host: str = _doc("address to bind for /metrics and /health", "127.0.0.1")
    metrics_port: OptionalPort = _doc("port of /metrics and /health; 0: any free one; -1: none", 0)
    kubernetes_namespace: str = _doc("namespace of the planned objects; empty: the planner pod's own, else default", "")
    rayservice: str = _doc("name of the RayService whose active RayCluster is planned", "")
    raycluster: str = _doc("name of a RayCluster without a RayService, instead of rayservice", "")
    groups: str = _doc(
        "worker groups by role, as prefill=GROUP,decode=GROUP; GROUP:2+1: two workers in a pod, and one spare pod",
        "",
    )
    lease: str = _doc("name of the Lease for leader election among planners", "tandem-planner")
    lease_s: Annotated[float, Meta(ge=3, le=MAX_FLOAT)] = _doc(
        "a leader that has not renewed its Lease for this long has lost it", 15.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    slo: SloConfig = SloConfig()
    handoff: HandoffConfig = HandoffConfig()
    transfer: TransferConfig = TransferConfig()
    worker: WorkerConfig = WorkerConfig()
    gateway: GatewayConfig = GatewayConfig()
    redis: RedisConfig = RedisConfig()
    cluster: ClusterConfig = ClusterConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    serve: ServeConfig = ServeConfig()
    planner: PlannerConfig = PlannerConfig()


def value_of(config: Config, key: str) -> Any:
    """Return the value of the setting `section.name`."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
