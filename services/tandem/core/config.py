"""The one tree of settings, frozen; never merges layers or reads a file.

`tandem.core.settings` builds the tree from files, environment and flags, `tandem.core.config_rules` says which values
are refused. A program hands each room its section.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class Bytes(int):
    """A size; written `512MiB`, `2GiB` or a plain number of bytes."""

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
        "alias, directory, .gguf file, hub id, or random: and a published model's name", "smollm2-135m-instruct"
    )
    served_name: str = _doc("name clients use, or several, by commas; empty: the id's last part", "")
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = _doc(
        "of weights, activations and KV; auto: float32 on a CPU, bfloat16 on a GPU", "auto"
    )
    quantization: Literal["none", "int8"] = _doc("of weights; int8 computes in float32 with 8-bit products", "none")
    batch_invariant: bool = _doc(
        "a token's result has the same bits whatever shares its step, and in whichever chunk it is computed; on a GPU "
        "at the price of speed, on a CPU as its compiled kernels are anyway",
        False,
    )
    compact: bool = _doc("keep weights in fewer bits where each comes back exactly (compiled kernels)", True)
    device: Literal["cpu", "cuda"] = _doc("where the model runs", "cpu")
    generation_config: Literal["auto", "none"] = _doc("none: ignore the model's own sampling defaults", "auto")
    cache_dir: str = _doc("imported models; empty: $XDG_CACHE_HOME/tandem/models", "")

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's name and its aliases."""
        if not self.served_name:
            return (PurePath(self.id).name.removesuffix(".gguf"),)
        return tuple(name.strip() for name in self.served_name.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    max_num_batched_tokens: int = _doc("token budget of one step", 512)
    max_num_seqs: int = _doc("sequences that may run at once", 64)
    max_model_len: int = _doc("prompt and output tokens of one request; 0: what the model and the KV pool allow", 0)
    block_size: int = _doc("tokens per KV block; 0: 16 on a CPU, 64 on a GPU", 0)
    tensor_parallel: int = _doc(
        "ranks that compute one worker's model together, each in a process and on a device of its own", 1
    )
    enable_chunked_prefill: bool = _doc("off: a prompt is computed in one step, whatever the budget", True)
    enable_prefix_caching: bool = _doc("reuse the KV of equal prefixes", True)
    kv_cache_memory: Bytes = _doc(
        "size of the KV pool, of each rank; 0: 1GiB on a CPU, on a GPU what gpu_memory_utilization leaves", Bytes(0)
    )
    gpu_memory_utilization: float = _doc(
        "share of a GPU's memory that its workers take, KV pools included; `serve` divides it among those of one GPU",
        0.9,
    )
    kv_cache_dtype: Literal["auto", "float8_e4m3fn"] = _doc(
        "numbers of KV; auto: as the model computes; float8: in a byte each, with a scale per token, head and plane",
        "auto",
    )
    host_cache_memory: Bytes = _doc(
        "host memory for blocks that the pool has no room for; 0: none. It pays where a GPU's memory is scarce: on a "
        "CPU it is memory like the pool's, at the price of copies",
        Bytes(0),
    )
    cuda_graphs: bool = _doc("on a GPU, steps that only decode are captured once per batch size and replayed", True)
    plan_depth: int = _doc(
        "steps that may be planned and not finished: with 2 the next one is planned while a GPU computes; 0: by device",
        0,
    )
    num_threads: int = _doc("compute threads of one worker; 0: its share of the cores", 0)
    kernels: Literal["auto", "compiled", "reference"] = _doc(
        "auto on a CPU: compiled ones where a C++ compiler, dtype and sizes allow, else plain torch; on a GPU its own",
        "auto",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    method: Literal["off", "ngram"] = _doc(
        "ngram: guess what followed the same tokens before; never changes output", "off"
    )
    num_tokens: int = _doc("guesses of one sequence in a step, at most", 8)
    max_batch_tokens: int = _doc(
        "running sequences and guesses in one step; more sequences than this guess nothing", 16
    )
    ngram_min: int = _doc("tokens that must have come before for a guess", 2)
    ngram_max: int = _doc("tokens compared to choose among several places", 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """Milliseconds, for each lane; 0 promises nothing. The first two are those of the interactive lane."""

    ttft_ms: float = _doc("first token, interactive lane; a prompt about to miss it goes ahead of shorter ones", 0.0)
    itl_ms: float = _doc("between two tokens, interactive lane; steps compute only as much of prompts as fits", 0.0)
    standard_ttft_ms: float = _doc("the same, standard lane", 0.0)
    standard_itl_ms: float = _doc("the same, standard lane", 0.0)
    batch_ttft_ms: float = _doc("the same, batch lane", 0.0)
    batch_itl_ms: float = _doc("the same, batch lane", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    transport: Literal["nixl", "local"] = _doc("how KV blocks move between workers", "nixl")
    lease_s: float = _doc("how long a producer keeps offered KV without a renewal", 10.0)
    pull_timeout_s: float = _doc("a pull is lost when no KV or no word of its source comes for so long", 30.0)
    drain_timeout_s: float = _doc("a read that does not end for this long costs the whole peer", 10.0)
    digests: bool = _doc("check every block that was read; off is for measuring only", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """What the link between two workers must be like, which some measure when they meet, others when they are used."""

    require: Literal["any", "rdma", "cuda_ipc", "shared_memory"] = _doc(
        "by what KV must move: rdma is asked between machines, cuda_ipc and shared_memory inside one", "any"
    )
    min_gbps: float = _doc("gigabytes per second that a way must carry in a test; 0: any", 0.0)
    on_slow_link: Literal["refuse", "warn"] = _doc(
        "refuse: hand-offs do not use a pair once its way is known not to be as required: a few pairs of each worker "
        "are measured before they are used, others once reads of 1 MiB and more have brought 16 MiB; prefixes that "
        "workers lend each other are not asked. warn: hand-offs use it, and logs and metrics say so",
        "refuse",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    pool: Literal["prefill", "decode", "mixed"] = _doc("label that routers read", "mixed")
    id: str = _doc("stable name; empty: host and process id", "")
    host: str = _doc(
        "address to bind and to announce; of 0.0.0.0 and :: it announces $POD_IP, else an address of its machine",
        "127.0.0.1",
    )
    host_label: str = _doc("which machine it is on; KV moves fastest between workers of one", "")
    rack: str = _doc("which rack, likewise", "")
    zone: str = _doc("which zone, likewise", "")
    port: int = _doc("0: any free one", 0)
    advertise_address: str = _doc(
        "host:port at which others reach it, behind a proxy or NAT; port 0: the one it listens at; empty: where it "
        "listens",
        "",
    )
    drain_s: float = _doc("how long running work may take to move or to end after SIGTERM", 20.0)
    gateway_grace_s: float = _doc("jobs of a gateway whose stream is gone live this long", 10.0)
    step_stall_s: float = _doc("a step longer than this (and 20 times its prediction) is unhealthy", 30.0)
    queue_horizon_ms: float = _doc(
        "predicted prefill taken on beside the longest prompt of each size; the rest waits in gateways; 0: two steps",
        0.0,
    )
    step_log: str = _doc("directory for a file of each life's steps, which only grows; empty: none", "")
    run_dir: str = _doc("directory for a file while it runs, by which `tandem drain --local` finds it; empty: none", "")
    metrics_port: int = _doc("port of its own /metrics; 0: any free one, which gateways list; -1: none", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    host: str = _doc("address to bind", "127.0.0.1")
    port: int = _doc("HTTP port; 0: any free one", 8000)
    grpc_port: int = _doc("gRPC port; 0: any free one; -1: the one after port, any free one where that is 0", -1)
    auth: Literal["keys", "off"] = _doc("keys: whoever has none is refused; off: everybody is served", "keys")
    tenants: str = _doc("YAML file of tenants and the hashes of their keys; read again when it changes", "")
    disaggregation: Literal["off", "auto", "prefer", "strict"] = _doc(
        "off: never split; auto: where it costs less; prefer: split when both pools live; strict: refuse otherwise",
        "prefer",
    )
    routing_policy: Literal["cost", "random", "round_robin", "least_loaded", "prefix"] = _doc(
        "how workers are chosen; all but cost are there to compare with", "cost"
    )
    remote_prefix: bool = _doc(
        "a prompt's beginning is read from another worker's cache where that costs less than computing it", True
    )
    max_body: Bytes = _doc("largest request body or gRPC message", Bytes(4 << 20))
    request_timeout_s: float = _doc("a request that has not arrived whole for this long is refused", 60.0)
    stalled_client_s: float = _doc("a client that takes nothing of its response for this long is cut off", 60.0)
    max_connections: int = _doc("HTTP connections, and gRPC calls, at once; of more only probes are answered", 4096)
    queue_timeout_s: float = _doc("a request that finds no place for this long is refused", 120.0)
    no_worker_wait_s: float = _doc("the same while no worker that could serve it lives, as after a crash", 30.0)
    max_retries: int = _doc("failed attempts without a new token that a request survives in a row", 4)
    # Four times what workers wait for each other: what they notice they tell before, and a long prompt has its time.
    progress_timeout_s: float = _doc("workers that bring a request no further for this long have failed it", 120.0)
    drain_s: float = _doc("how long requests under way may take after SIGTERM", 20.0)
    worker_timeout_s: float = _doc("a worker whose stream carries nothing for this long is lost", 10.0)
    heartbeat_s: float = _doc("a stream without a first token yet sends a comment this often", 10.0)
    max_queued: int = _doc("requests that may wait for a place; of more, the tenant with most of them loses one", 1024)
    early_rejection: Literal["on", "off"] = _doc(
        "refuse at once what by prediction misses its lane's slo or its client's deadline", "on"
    )
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = _doc(
        "how the model writes tool calls; auto: as its chat template or vocabulary tells", "auto"
    )
    console: bool = _doc("serve the console at /console; with keys it asks for one", True)
    reasoning_parser: Literal["auto", "think", "none"] = _doc(
        "whether text in <think> is reasoning; auto: if the model's template or vocabulary knows the mark", "auto"
    )

    @property
    def own_grpc_port(self) -> int:
        """What `grpc_port` comes to; 0: any free one."""
        if self.grpc_port >= 0:
            return self.grpc_port
        return self.port + 1 if self.port else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """What every program says of itself. Where OpenTelemetry's traces and metrics go is said by its own `OTEL_*`
    variables; without them nothing is sent."""

    log_format: Literal["text", "json"] = _doc("lines for people, or one JSON object per line", "text")
    log_level: Literal["debug", "info", "warning", "error"] = _doc("what is less is not logged", "info")
    log_requests: Literal["off", "failed", "all"] = _doc("which ended requests the gateway logs a line of", "failed")
    max_values: int = _doc("tenants, and models and workers, that metrics tell apart; the rest is 'other'", 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    url: str = _doc(
        "redis://, rediss:// or unix://; redis+cluster:// or rediss+cluster:// with nodes, between commas; "
        "empty: an embedded server where `serve` starts one",
        "",
    )
    namespace: str = _doc("prefix of every key", "tandem")
    index_stride: int = _doc("blocks of a prompt for each one in the prefix index; the same in gateways and workers", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How gateways and workers know each other; the same for all of them."""

    secret_file: str = _doc(
        "file with a secret of 32 bytes or more per line: the first signs, a second is accepted", ""
    )
    insecure: bool = _doc("a worker without a secret or TLS may listen where others reach it", False)
    tls_cert_file: str = _doc("PEM; with all three, TLS between gateways and workers; names tandem-cluster", "")
    tls_key_file: str = _doc("PEM, of tls_cert_file", "")
    tls_ca_file: str = _doc("PEM; whose certificates are believed", "")

    @property
    def has_tls(self) -> bool:
        return bool(self.tls_cert_file or self.tls_key_file or self.tls_ca_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    prefill: int = _doc("prefill workers", 1)
    decode: int = _doc("decode workers", 1)
    mixed: int = _doc("mixed workers", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """How many workers of each role there should be, so that the targets of `slo` are kept."""

    mode: Literal["explain", "act"] = _doc("explain: decide and say why, change nothing", "explain")
    actuator: Literal["serve", "raycluster"] = _doc(
        "serve: Serve's autoscaling policy is told, and Ray's autoscaler adds pods; raycluster: the pods of a "
        "RayCluster whose own autoscaler is off are planned too",
        "serve",
    )
    model: str = _doc("whose workers are planned; empty: the one that they serve", "")
    interval_s: float = _doc("between two decisions", 5.0)
    window_s: float = _doc("of the past that a forecast looks at", 300.0)
    start_s: float = _doc("how long a new worker takes until it serves; a forecast looks as far ahead", 60.0)
    percentile: float = _doc("of requests that are to keep the targets", 99.0)
    headroom: float = _doc("share of the capacity that is left free beyond what the forecast asks for", 0.15)
    scale_down_s: float = _doc("so long a smaller fleet must have been enough before workers end", 300.0)
    change_roles: bool = _doc("set the role of a worker rather than start one where that is enough", True)
    min_prefill: int = _doc("prefill workers, at least", 1)
    max_prefill: int = _doc("at most; 0: any number", 0)
    min_decode: int = _doc("decode workers, at least", 1)
    max_decode: int = _doc("at most; 0: any number", 0)
    host: str = _doc("address to bind for /metrics and /health", "127.0.0.1")
    metrics_port: int = _doc("port of /metrics and /health; 0: any free one; -1: none", 0)
    kubernetes_namespace: str = _doc("where its objects are; empty: that of the planner's own pod, else default", "")
    rayservice: str = _doc("the RayService whose active RayCluster is planned", "")
    raycluster: str = _doc("a RayCluster that no RayService owns, instead", "")
    groups: str = _doc(
        "worker groups by role, as prefill=GROUP,decode=GROUP; GROUP:2+1 has two workers in a pod, and a pod to spare",
        "",
    )
    lease: str = _doc("name of the Lease by which one planner leads", "tandem-planner")
    lease_s: float = _doc("a leader that has not renewed its Lease for so long is taken to be gone", 15.0)


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
    """The value at `section.name`."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
