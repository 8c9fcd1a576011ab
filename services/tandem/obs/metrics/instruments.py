"""List every metric of Tandem.

`gen_ai.*` are names of OpenTelemetry's semantic conventions for generative AI, as of 2026 (status: development). In
Prometheus dots become underscores, the unit becomes a suffix and a counter ends in `_total`, so `tandem.step.duration`
is `tandem_step_duration_seconds`. Unit "1" marks ratios; values that are 0 or 1 have no unit."""

from __future__ import annotations

from tandem.obs.metrics.instrument import Instrument, counter, gauge, histogram

LATENCY = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Bucket bounds in seconds, for times to a first token, of requests and of their stages."""
GAP = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
"""Bucket bounds in seconds, for times between two tokens and of steps."""
TOKENS = tuple(4.0**power for power in range(10))

MODEL = "gen_ai.request.model"
_GEN_AI = ("gen_ai.operation.name", MODEL, "tenant", "lane")
_BY_PULL = ("kind", "transport")
_PATHS = "`path` is that of tandem.placements, or `none` for a request that was never placed."
_PULLS = "`kind` is `handoff` or `prefix` (a remote prefix fetch)"
_PULLS_BY_TRANSPORT = f"{_PULLS}; `transport` is the value of transfer.backend"

# ---- what clients see: gateway

TIME_TO_FIRST_TOKEN = histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "Measures the seconds from a request's arrival at the gateway to its first token.",
    LATENCY,
    _GEN_AI,
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Measures the mean seconds between two tokens of each finished request.",
    GAP,
    _GEN_AI,
)
REQUEST_DURATION = histogram(
    "gen_ai.server.request.duration",
    "s",
    "Measures the seconds from a request's arrival at the gateway to its end. `error.type` is empty for a finished"
    " request, `cancelled` where the client left, else the kind of the error.",
    LATENCY,
    (*_GEN_AI, "error.type"),
)
TOKEN_USAGE = histogram(
    "gen_ai.client.token.usage",
    "{token}",
    "Measures the tokens of each ended request. `gen_ai.token.type` is `input` for the prompt and `output` for the"
    " answer.",
    TOKENS,
    (*_GEN_AI, "gen_ai.token.type"),
)
INTER_TOKEN_LATENCY = histogram(
    "tandem.inter_token_latency",
    "s",
    "Measures the seconds between two consecutive tokens of one choice, when the gateway sends them.",
    GAP,
    ("lane", MODEL),
)

# ---- requests: gateway

REQUESTS = counter(
    "tandem.requests",
    "{request}",
    "Counts requests that have ended. `outcome` is `finished`, `cancelled` where the client left, or the kind of the"
    " error.",
    ("endpoint", "outcome", "lane", "tenant"),
)
HTTP_RESPONSES = counter(
    "tandem.http.responses",
    "{response}",
    "Counts HTTP responses of all endpoints. `status` is the status code.",
    ("status",),
)
OPEN_REQUESTS = gauge(
    "tandem.open_requests", "{request}", "Reports the requests that the gateway has received and not yet ended."
)
QUEUED_REQUESTS = gauge(
    "tandem.queued_requests", "{request}", "Reports the requests that wait in the gateway's request queue.", ("lane",)
)
HELD_REQUESTS = gauge(
    "tandem.held_requests",
    "{request}",
    "Reports the requests that wait because no worker, not even a full one, could serve them, by model. They are also"
    " in tandem.queued_requests.",
    (MODEL,),
)
FAIRNESS_INDEX = gauge(
    "tandem.fairness_index",
    "1",
    "Reports how evenly the tenants that waited for at least half of the last minute were served, by model and lane:"
    " Jain's index of what each was charged, divided by its weight. 1 means all were served alike, or fewer than two"
    " waited.",
    (MODEL, "lane"),
)
WAITING_GRAMMARS = gauge(
    "tandem.waiting_grammars",
    "{grammar}",
    "Reports the grammars of structured output that wait for their turn to be compiled by the gateway.",
)
PROMPT_TOKENS = counter(
    "tandem.prompt_tokens",
    "{token}",
    f"Counts the prompt tokens of requests when they end. {_PATHS}",
    ("path", "tenant"),
)
CACHED_PROMPT_TOKENS = counter(
    "tandem.cached_prompt_tokens",
    "{token}",
    f"Counts the prompt tokens that were read from a prefix cache, when their request ends. {_PATHS}",
    ("path", "tenant"),
)
OUTPUT_TOKENS = counter(
    "tandem.output_tokens",
    "{token}",
    f"Counts the output tokens of requests when they end. {_PATHS}",
    ("path", "tenant"),
)
STAGE_DURATION = histogram(
    "tandem.request.stage.duration",
    "s",
    "Measures the seconds that a request spent in each of the nine stages of docs/telemetry.md, which add up to its"
    " duration. `stage` is the name of the stage.",
    LATENCY,
    ("stage", "lane", MODEL),
)
ADMISSIONS = counter(
    "tandem.admissions",
    "{request}",
    "Counts decisions on admission. `decision` is `admitted` or `refused`; `reason` is the limit or error that refused"
    " the request.",
    ("decision", "reason", "lane", "tenant"),
)
PLACEMENTS = counter(
    "tandem.placements",
    "{request}",
    "Counts placed requests when they end. `path` is `remote` (prefill and decode on two workers), `local` (both on one"
    " worker) or `fallback` (on one worker, because two were not possible); `reason` says why.",
    ("path", "reason"),
)
RETRIES = counter(
    "tandem.request.retries",
    "{retry}",
    "Counts the attempts after the first of each request: retries after a failure, and migrations.",
)
REBALANCE_MOVES = counter(
    "tandem.rebalance.moves",
    "{move}",
    "Counts plans to move a running sequence from one decode worker to another for a shorter inter-token latency, or a"
    " preempted one, or one on a worker that became a prefill worker, to a worker with room (gateway.rebalance)."
    " `outcome` is `advised` (explain only), `moved`, `resumed` (a preempted one continues there), `withdrawn` (its"
    " worker did not offer it or the other one did not take it over) or `ended` (the request ended or its worker was"
    " lost meanwhile).",
    ("outcome",),
)
SLO_REQUESTS = counter(
    "tandem.slo.requests",
    "{request}",
    "Counts ended requests of lanes with a latency target, without those that failed by their client's fault. `slo` is"
    " `ttft`, `itl` or `both`; `met` is `true` or `false`.",
    ("lane", "slo", "met"),
)
SLO_TARGET = gauge(
    "tandem.slo.target",
    "s",
    "Reports the latency target of each lane in seconds. `slo` is `ttft` or `itl`.",
    ("lane", "slo"),
)

# ---- tenants: gateway

TENANT_OPEN_REQUESTS = gauge(
    "tandem.tenant.open_requests", "{request}", "Reports the requests of each tenant that have not ended.", ("tenant",)
)
TENANT_QUOTA_LEFT = gauge(
    "tandem.tenant.quota.left",
    "1",
    "Reports the fraction of a tenant's limit that was left in Redis' latest reply, 0 to 1. `limit` is `requests` or"
    " `tokens`, both per minute.",
    ("tenant", "limit"),
)
QUOTAS_SHARED = gauge(
    "tandem.quotas.shared",
    "",
    "Reports 1 while quotas are kept in Redis for all gateways, 0 while this gateway grants its fraction of each limit"
    " by itself.",
)

# ---- workers, as a gateway sees them

READY = gauge("tandem.ready", "", "Reports 1 if this gateway can serve requests, else 0.")
MODEL_SHORTAGE = gauge(
    "tandem.model.shortage",
    "",
    "Reports 1 while a model lacks what `gateway.disaggregation` needs: a live worker at all, a prefill or decode "
    "worker, or a link between the two over which a block has moved. A model without open requests does not lack "
    "workers for which the planner's minimum is 0.",
    (MODEL, "lacks"),
)
SERVED_MODELS = gauge(
    "tandem.served_models", "{model}", "Reports the number of models that clients may request, by any of their names."
)
WAKEABLE_MODELS = gauge(
    "tandem.wakeable_models",
    "{model}",
    "Reports the number of models of which a planner may let the pool be empty, and starts workers when requests wait. "
    "A model of which a registered worker cannot be reached does not count; none does unless `gateway.wake_timeout_s` "
    "is set.",
    ("pool",),
)
LIVE_WORKERS = gauge(
    "tandem.live_workers",
    "{worker}",
    "Reports the workers of each pool from which this gateway has a stream.",
    ("pool",),
)
WORKER_BREAKER = gauge(
    "tandem.worker.breaker",
    "",
    "Reports the state of each worker's breaker: 0 closed; 0.5 half-open, the worker gets one trial job; 1 open, the"
    " worker gets no jobs because its last ones failed.",
    ("worker",),
)
TRANSFER_LINKS = gauge(
    "tandem.transfer.links",
    "{link}",
    "Reports the links over which one worker reads another. `link` is the measured type; `ok` is `true` if the link"
    " meets transfer.require and transfer.min_gbps, else `false`.",
    ("link", "ok"),
)
PREFIX_INDEX_REACHABLE = gauge(
    "tandem.prefix.index.reachable",
    "",
    "Reports 1 if this gateway can read the prefix index from Redis, 0 if it uses its last copy.",
)
PREFIX_INDEX_WORKERS = gauge(
    "tandem.prefix.index.workers", "{worker}", "Reports the workers whose cached blocks are in this gateway's mirror."
)
PREFIX_INDEX_WORKERS_EXPECTED = gauge(
    "tandem.prefix.index.workers_expected",
    "{worker}",
    "Reports the live workers whose cached blocks this gateway still has to load from a snapshot.",
)
PREFIX_INDEX_BLOCKS = gauge(
    "tandem.prefix.index.blocks", "{block}", "Reports the cached blocks of all workers in this gateway's prefix mirror."
)
PREFIX_INDEX_BYTES = gauge(
    "tandem.prefix.index.size", "By", "Reports the bytes of memory of this gateway's prefix mirror."
)
PREFIX_PREDICTED_TOKENS = counter(
    "tandem.prefix.predicted_tokens",
    "{token}",
    "Counts prompt tokens that the prefix index predicted to be cached on the worker that was chosen.",
)
PREFIX_STALE_HIT_TOKENS = counter(
    "tandem.prefix.stale_hit_tokens",
    "{token}",
    "Counts predicted prompt tokens that the worker no longer had in its cache and had to compute.",
)
REDIS_UP = gauge(
    "tandem.redis.up",
    "",
    "Reports 1 if Redis executes this process' commands, 0 from a failed command until that command succeeds again.",
)
REDIS_ERRORS = counter(
    "tandem.redis.errors",
    "{command}",
    "Counts commands that Redis did not execute. `store` is what they were for, such as `registry`, `index` or"
    " `quota`.",
    ("store",),
)

# ---- steps: worker

STEPS = counter(
    "tandem.steps",
    "{step}",
    "Counts the steps that ran. `kind` is `prefill` (prompt chunks), `decode` (one token per sequence) or `mixed`"
    " (both).",
    ("kind",),
)
STEP_DURATION = histogram(
    "tandem.step.duration", "s", "Measures the seconds from the planning of a step to its results.", GAP, ("kind",)
)
STEP_PREDICTED_DURATION = histogram(
    "tandem.step.predicted_duration",
    "s",
    "Measures the seconds that the step time model predicted for each step that ran.",
    GAP,
    ("kind",),
)
STEP_PREFILL_TOKENS = counter("tandem.step.prefill_tokens", "{token}", "Counts the prompt tokens that steps computed.")
STEP_DECODE_TOKENS = counter(
    "tandem.step.decode_tokens", "{token}", "Counts the sequences that each step decoded, summed over all steps."
)
STEP_BUDGET_TOKENS = counter(
    "tandem.step.budget_tokens",
    "{token}",
    "Counts the prompt tokens that each step was allowed to compute, summed over all steps.",
)
STEPS_SATURATED = counter(
    "tandem.step.saturated", "{step}", "Counts the steps that computed all prompt tokens that they were allowed to."
)
STEPS_OVER_TARGET = counter(
    "tandem.step.over_target",
    "{step}",
    "Counts the steps that were predicted to exceed slo.itl_ms even with the least number of prompt tokens.",
)
PREEMPTIONS = counter(
    "tandem.preemptions",
    "{sequence}",
    "Counts the sequences whose KV blocks were taken away, because no other was free, and computed again.",
)
LANE_PREEMPTIONS = counter(
    "tandem.lane.preemptions",
    "{sequence}",
    "Counts the running sequences that yielded their seats and KV blocks to requests of a more urgent lane; they are "
    "computed again.",
)
SEQUENCES = gauge(
    "tandem.sequences",
    "{sequence}",
    "Reports the engine's sequences. `state` is `running`, `waiting` (new), or `paused` (begun, and waiting).",
    ("state",),
)
LANE_SEQUENCES = gauge(
    "tandem.lane_sequences",
    "{sequence}",
    "Reports the sequences of each lane that run, read their KV from another worker, or have a seat reserved. One that"
    " stands for several choices counts with the seats that they will take.",
    ("lane",),
)
LANE_KV_BLOCKS = gauge(
    "tandem.lane_kv_blocks",
    "{block}",
    "Reports the KV blocks that sequences of each lane hold or have reserved. A block that several share counts for"
    " each.",
    ("lane",),
)
QUEUED_TOKENS = gauge(
    "tandem.queued_tokens",
    "{token}",
    "Reports the prompt tokens that the worker has accepted and not computed yet.",
    ("lane",),
)
DRAFTED_TOKENS = counter(
    "tandem.speculative.drafted_tokens", "{token}", "Counts the tokens that speculative decoding drafted."
)
ACCEPTED_TOKENS = counter(
    "tandem.speculative.accepted_tokens", "{token}", "Counts the drafted tokens that the model accepted."
)

EXPERT_TOKENS = counter(
    "tandem.expert.tokens",
    "{token}",
    "Counts the tokens that each expert of a model has computed, prompt and output tokens alike. `expert` is the"
    " number of the expert in its layer; experts of all layers with the same number are counted together, because"
    " engine.enable_expert_parallel puts them on the same rank.",
    ("expert",),
)
EXPERT_IMBALANCE = gauge(
    "tandem.expert.imbalance",
    "1",
    "Reports the most tokens that one expert of a layer computed, divided by the mean over the layer's experts: 1 if"
    " all computed equally many. It covers the last complete window of at least 60 seconds, and a window without"
    " tokens has no value.",
    ("layer",),
)

# ---- KV: worker

KV_CAPACITY = gauge("tandem.kv.capacity", "{block}", "Reports the KV blocks of the worker's pool.")
KV_INFO = gauge(
    "tandem.kv.info",
    "",
    "Reports 1. The labels describe the worker's pool of KV blocks: the tokens of a block and the number of blocks.",
    ("block_size", "num_blocks"),
)
KV_BLOCKS = gauge(
    "tandem.kv.blocks",
    "{block}",
    "Reports KV blocks by state. `used` and `free` add up to the pool. `cached` blocks are also free; `retained` ones"
    " are evicted last, once for each tenant that asked for it. `promised` blocks"
    " are free and reserved for requests on their way. `leased` blocks are offered to other workers, and reads write to"
    " `reading` ones. `quarantined` blocks wait for proof that no transfer writes to them. `host` blocks are in host"
    " memory, outside the pool. `file` blocks are in files, which other workers may share.",
    ("state",),
)
KV_UNUSED = gauge(
    "tandem.kv.free_ratio",
    "1",
    "Reports the fraction of the pool that a new sequence could use, 0 to 1, cached blocks included.",
)
LEASES = gauge("tandem.leases", "{lease}", "Reports the leases under which the worker holds KV blocks for consumers.")
PULLS = gauge("tandem.pulls", "{pull}", "Reports the open pulls, for handoffs and remote prefix fetches.")
PREFIX_QUERIED_TOKENS = counter(
    "tandem.prefix.queried_tokens", "{token}", "Counts the prompt tokens that were looked up in the worker's cache."
)
PREFIX_HIT_TOKENS = counter(
    "tandem.prefix.hit_tokens", "{token}", "Counts the prompt tokens that were found in the worker's cache."
)
PREFIX_REMOTE_HIT_TOKENS = counter(
    "tandem.prefix.remote_hit_tokens",
    "{token}",
    "Counts the prompt tokens whose KV was read from another worker's cache instead of computed.",
)
PREFIX_FILE_HIT_TOKENS = counter(
    "tandem.prefix.file_hit_tokens", "{token}", "Counts the prompt tokens whose KV was read from files."
)

# ---- transfer: worker

TRANSFERS = counter(
    "tandem.transfers",
    "{transfer}",
    f"Counts pulls that have ended. {_PULLS}; `outcome` is `done`, `cancelled` or `failed`.",
    ("kind", "outcome"),
)
TRANSFER_BYTES = counter(
    "tandem.transfer.bytes", "By", f"Counts the bytes that pulls have read. {_PULLS_BY_TRANSPORT}.", _BY_PULL
)
TRANSFER_EXPOSED_BYTES = counter(
    "tandem.transfer.exposed_bytes",
    "By",
    f"Counts the bytes that were unread when the last block of a pull was announced. {_PULLS_BY_TRANSPORT}.",
    _BY_PULL,
)
TRANSFER_BUSY = counter(
    "tandem.transfer.busy",
    "s",
    f"Counts the seconds in which at least one read of a pull was open. {_PULLS_BY_TRANSPORT}.",
    _BY_PULL,
)
TRANSFER_DURATION = histogram(
    "tandem.transfer.duration",
    "s",
    f"Measures the seconds from the first announced block of a pull to its last verified one. {_PULLS}.",
    LATENCY,
    ("kind",),
)
TRANSFER_EXPOSED_DURATION = histogram(
    "tandem.transfer.exposed_duration",
    "s",
    f"Measures the seconds from the last announced block of a pull to its last verified one. {_PULLS}.",
    LATENCY,
    ("kind",),
)

# ---- jobs and state: worker

JOBS = counter(
    "tandem.jobs",
    "{job}",
    "Counts jobs that have ended. `kind` is `generate` (prefill and decode), `prefill` or `resume` (decode after a"
    " handoff). `outcome` is `finished`, `handed_over` (to a decode worker), `moved` (migrated), `given_back` (by a"
    " draining worker), `cancelled` or `failed`.",
    ("kind", "outcome"),
)
JOB_QUEUE_DURATION = histogram(
    "tandem.job.queue.duration",
    "s",
    "Measures the seconds for which a job waited for its first step, once it was accepted and any KV that it needs had"
    " arrived. `kind` is that of tandem.jobs.",
    LATENCY,
    ("kind",),
)
GENERATED_TOKENS = counter("tandem.generated_tokens", "{token}", "Counts the tokens that the worker sampled.")
WORKER_HEALTHY = gauge(
    "tandem.worker.healthy", "", "Reports 1 if the worker can run jobs, 0 if it should be restarted."
)
WORKER_DRAINING = gauge(
    "tandem.worker.draining", "", "Reports 1 if the worker is draining and accepts no new jobs, else 0."
)
WORKER_GATEWAYS = gauge(
    "tandem.worker.gateways",
    "{gateway}",
    "Reports the gateways that have a stream from the worker, or had one within worker.gateway_grace_s.",
)
WORKER_INFO = gauge(
    "tandem.worker.info",
    "",
    "Reports 1. The labels describe the worker: its id, its pool, its model and the transport that moves its KV.",
    ("worker", "pool", "model", "transport"),
)

# ---- planner

PLANNER_TARGET = gauge(
    "tandem.planner.target", "{worker}", "Reports the number of workers that the planner decided on last.", ("role",)
)
PLANNER_NEEDED = gauge(
    "tandem.planner.needed",
    "{worker}",
    "Reports the number of workers that the forecast requires, before planner.min_*, planner.max_* and the delay of"
    " planner.scale_down_s.",
    ("role",),
)
PLANNER_WORKERS = gauge(
    "tandem.planner.workers",
    "{worker}",
    "Reports the workers at the last decision. `state` is `serving`, `starting` or `draining`.",
    ("role", "state"),
)
PLANNER_DECISIONS = counter(
    "tandem.planner.decisions",
    "{decision}",
    "Counts decisions. `outcome` is `carried_out`, `explained` (planner.mode=explain), `held_back` (for lack of data),"
    " `standby` (another planner leads) or `failed`.",
    ("outcome",),
)
PLANNER_HELD_BACK = gauge(
    "tandem.planner.held_back",
    "",
    "Reports 1 while the planner lacks data and changes nothing, else 0. Its log says which data.",
)
PLANNER_LEADER = gauge(
    "tandem.planner.leader", "", "Reports 1 if this planner leads and its decisions are applied, else 0."
)
PLANNER_ACTUATOR_ERRORS = counter(
    "tandem.planner.actuator.errors",
    "{call}",
    "Counts failed calls of the Kubernetes API. `status` is the HTTP status, `invalid` or `no_answer`.",
    ("status",),
)

# ---- every process

PROCESS_CPU = counter("process.cpu.time", "s", "Counts the seconds of CPU time that the process has used.")
PROCESS_MEMORY = gauge("process.memory.usage", "By", "Reports the bytes of resident memory of the process.")
PROCESS_FILES = gauge(
    "process.open_file_descriptor.count", "{file}", "Reports the open file descriptors of the process."
)
SPANS_DROPPED = counter(
    "tandem.span.dropped", "{span}", "Counts spans that were dropped because too many waited to be sent."
)
LOG_LINES_DROPPED = counter(
    "tandem.log.dropped", "{line}", "Counts log lines that were dropped because too many were alike."
)


def all_instruments() -> tuple[Instrument, ...]:
    return tuple(value for value in globals().values() if isinstance(value, Instrument))
