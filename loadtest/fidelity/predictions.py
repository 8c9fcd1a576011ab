"""Compute what the simulator predicts for a measured run: profiles, predictions and replays."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from loadtest.client.records import Record
from loadtest.common.stats import percentile
from loadtest.fidelity.recorded_runs import StoredRun
from loadtest.fidelity.replay import Replay
from tandem.cli.fit_cost import fit_all, profile_of
from tandem.core.config import GatewayConfig
from tandem.core.ids import RequestId
from tandem.core.request import Request, SamplingParams
from tandem.engine.step_log import LoggedStep
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.cluster.cluster_spec import ClusterSpec
from tandem.sim.cluster.worker import WorkerSpec
from tandem.sim.cost.residuals import NONE
from tandem.sim.machines.profile import Profile, pool_named
from tandem.workload import seeded_random
from tandem.workload.scheduled_request import MODEL, ScheduledRequest

NUM_DELIVERIES = 200
SHM_BANDWIDTH = 5e9
"""Bytes/s between two workers of one machine, about what `loadtest.kv.transfer` measures."""
EARLY_S = 0.005
"""Most seconds by which a token may arrive before the end of its step: the engine's thread notes the end after it has
handed the tokens over, and may wait for the interpreter's lock before (1.4 ms in one run)."""


class Seen(NamedTuple):
    """Latencies of one request as its client saw them, in seconds from when it was due."""

    group: str
    due_s: float
    ttft_s: float
    last_s: float


class Times(NamedTuple):
    """Latencies that the clients of one run saw, by request, and the gaps between tokens of all requests.

    `unlike`: for a replay, the share of steps for which the log had no similar step.
    """

    seen: dict[str, Seen]
    gaps: list[float]
    num_tokens: int
    unlike: float = 0.0

    @property
    def ttft(self) -> list[float]:
        return [one.ttft_s for one in self.seen.values()]

    @property
    def output_rate(self) -> float:
        """Return the tokens per second from the first due time to the last token."""
        first = min(one.due_s for one in self.seen.values())
        return self.num_tokens / (max(one.due_s + one.last_s for one in self.seen.values()) - first)


def times_of(records: Sequence[Record]) -> Times:
    """Return the latencies in the records of real clients."""
    seen = {r.name: Seen(r.group, r.due_s, r.ttft_s, r.stamps_s[-1] - r.due_s) for r in records}
    return Times(seen, [gap for r in records for gap in r.gaps_s], sum(r.num_output_tokens for r in records))


def traced(traces: Sequence[ClientTrace]) -> Times:
    """Return the latencies of simulated clients; tokens that arrived together are one arrival, as for real clients."""
    seen: dict[str, Seen] = {t.id: Seen(t.group, t.due_s, t.ttft_s, t.ended_at - t.due_s) for t in traces}
    gaps = [gap for trace in traces for gap in trace.gaps_s if gap > 0]
    return Times(seen, gaps, sum(len(trace.token_times) for trace in traces))


def profile_from(kept: StoredRun, note: str) -> Profile:
    """Fit a profile of the workers of one stored run, and of the link between them and the client."""
    deliveries = _deliveries(kept)
    latency_s = _latency(kept)
    profile = profile_of(kept.logs, fit_all(kept.logs), latency_s, SHM_BANDWIDTH, note)
    late = sorted(max(0.0, seconds - latency_s) for seconds in deliveries)
    count = min(NUM_DELIVERIES, len(late))
    return replace(profile, delivery_s=tuple(late[int((i + 0.5) * len(late) / count)] for i in range(count)))


def predicted(profile: Profile, kept: StoredRun, seed: int) -> Times:
    """Simulate the requests of a stored run with `profile` alone, and return their latencies."""
    pools = Counter(log.head.pool for log in kept.logs)
    workers = tuple((profile.worker(pool_named(pool)), number) for pool, number in sorted(pools.items()))
    return _simulated(workers, kept, profile.latency_s, profile.delivery_s, seed)


def replayed(kept: StoredRun) -> Times:
    """Simulate the requests of a stored run with the recorded time of each step, and return their latencies."""
    own = profile_from(kept, "")
    workers, replays = [], []
    for log in kept.logs:
        spec = own.worker(pool_named(log.head.pool))
        replays.append(Replay(log, own.workers[spec.pool].cost))
        workers.append((replace(spec, step_time=replays[-1].seconds, residuals=NONE, max_run=1), 1))
    times = _simulated(tuple(workers), kept, own.latency_s, own.delivery_s, 0)
    num_steps = sum(replay.num_matched + replay.num_unmatched for replay in replays)
    return times._replace(unlike=sum(replay.num_unmatched for replay in replays) / num_steps)


def _simulated(
    workers: tuple[tuple[WorkerSpec, int], ...],
    kept: StoredRun,
    latency_s: float,
    delivery_s: tuple[float, ...],
    seed: int,
) -> Times:
    spec = ClusterSpec(workers=workers, gateway=GatewayConfig(), latency_s=latency_s, delivery_s=delivery_s, seed=seed)
    return simulated(spec, _scheduled_requests(kept.run.records))


def simulated(spec: ClusterSpec, requests: Iterable[ScheduledRequest]) -> Times:
    """Simulate requests on a cluster and return their latencies.

    Raises AssertionError when a request fails or the simulation leaves requests or blocks behind.
    """
    cluster, traces = SimCluster(spec), list[ClientTrace]()
    cluster.run(requests, traces.append)
    cluster.check()
    assert all(trace.is_complete for trace in traces), "a request failed"
    return traced(traces)


def _scheduled_requests(records: Sequence[Record]) -> Iterator[ScheduledRequest]:
    """Yield the recorded requests with prompts that share no block, as those of the mix."""
    for number, record in enumerate(sorted(records, key=lambda record: record.due_s)):
        request = Request(
            id=RequestId(record.name),
            model=MODEL,
            prompt_tokens=seeded_random.tokens(record.num_prompt_tokens, "prompt", number),
            sampling=SamplingParams(max_tokens=record.num_requested_tokens, seed=number),
        )
        yield ScheduledRequest(request, record.group, record.due_s)


def _latency(kept: StoredRun) -> float:
    """Return the median time from a request's sending to the step that begins for it, where no step was running."""
    began = kept.run.began_unix_s
    steps = sorted((step for log in kept.logs for step in log.steps), key=lambda step: step.at)
    ends = [step.at for step in steps]
    found = []
    for record in kept.run.records:
        place = bisect_right(ends, began + record.sent_s)
        if place < len(steps):
            wait = _begin(steps[place]) - (began + record.sent_s)
            if wait > 0:
                found.append(wait)
    return percentile(found, 0.5) if found else 0.0


def _deliveries(kept: StoredRun) -> list[float]:
    """Return the times from the end of the step that sampled a token to its arrival.

    That step is the one whose end is the nearest; one that ended later counts only within `EARLY_S`, and the time is
    then 0."""
    ends = sorted(step.at for log in kept.logs for step in log.steps)
    found = []
    for stamp in (kept.run.began_unix_s + stamp for record in kept.run.records for stamp in record.stamps_s):
        place = bisect_right(ends, stamp)
        late_s = stamp - ends[place - 1] if place else math.inf
        early_s = ends[place] - stamp if place < len(ends) else math.inf
        if early_s < min(late_s, EARLY_S):
            found.append(0.0)
        elif place:
            found.append(late_s)
    return found


def _begin(step: LoggedStep) -> float:
    return step.at - step.record.measured_s
