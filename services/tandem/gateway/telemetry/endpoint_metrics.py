"""Report the load of this gateway and the KV cache behind it to the endpoint picker of an InferencePool.

An endpoint picker of the Gateway API Inference Extension chooses one of a pool's OpenAI endpoints for each request. In
Tandem these are gateways. The picker reads the first series of each metric and adds nothing up, so each metric has
exactly one series, over all models. Names and meanings are those of vLLM. They are not part of `/metrics`, where only
workers export them: a sum over a cluster would count each sequence twice."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.gateway.context.interfaces import RequestDispatcher
from tandem.gateway.telemetry.request_recorder import RequestRecorder
from tandem.obs.metrics.instrument import gauge
from tandem.obs.metrics.metrics import Metrics, Values

WAITING = gauge(
    "vllm:num_requests_waiting", "{request}", "Reports the requests that wait in the gateway's request queue."
)
RUNNING = gauge(
    "vllm:num_requests_running", "{request}", "Reports the gateway's open requests that do not wait in its queue."
)
KV_USAGE = gauge(
    "vllm:kv_cache_usage_perc",
    "",
    "Reports the fraction of all live workers' KV blocks that a new sequence could not use, 0 to 1.",
)
CACHE_CONFIG = gauge(
    "vllm:cache_config_info",
    "",
    "Reports 1. The labels are the tokens of a KV block, and the number of blocks of all live workers.",
    ("block_size", "num_gpu_blocks"),
)


def endpoint_metrics(dispatch: RequestDispatcher, recorder: RequestRecorder) -> Metrics:
    """Return the metrics for an endpoint picker, which read the gateway's state at each collection.

    The two metrics of KV blocks have no series while no live worker has reported any."""

    def num_waiting() -> int:
        return sum(dispatch.num_queued().values())

    def usage() -> Mapping[Values, float]:
        blocks = dispatch.kv_blocks()
        return {(): 1 - blocks.num_unused / blocks.num_blocks} if blocks is not None else {}

    def config() -> Mapping[Values, float]:
        blocks = dispatch.kv_blocks()
        return {(str(blocks.block_size), str(blocks.num_blocks)): 1} if blocks is not None else {}

    metrics = Metrics()
    metrics.watch(WAITING, lambda: {(): num_waiting()})
    metrics.watch(RUNNING, lambda: {(): max(0, recorder.num_open - num_waiting())})
    metrics.watch(KV_USAGE, usage)
    metrics.watch(CACHE_CONFIG, config)
    return metrics
