"""Every built-in mix runs on a simulated cluster to its end, and what prompts share, prefix caches find."""

from __future__ import annotations

import pytest

from tandem.sim.cluster.client_trace import ClientTrace
from tandem.workload.mix import Mix, scheduled_requests
from tandem.workload.request_class import Prefix, RequestClass
from tandem.workload.scheduled_request import ScheduledRequest
from tandem.workload.source import built_in_names, open_workload
from tests.simulation.clusters import cluster, gpu_spec, slow_spec, traces_of


def ended(requests: list[ScheduledRequest], *workers: tuple[object, int]) -> tuple[list[ClientTrace], int]:
    """Return all traces and the number of prompt tokens that were computed."""
    one = cluster(*workers)  # type: ignore[arg-type]
    traces = traces_of(one, requests)
    assert all(trace.is_complete for trace in traces)
    return traces, sum(worker.num_prefill_tokens for worker in one.workers)


@pytest.mark.parametrize("name", built_in_names())
def test_every_built_in_mix_ends_well(name: str) -> None:
    # Each of the conversations of `agent` has many turns.
    requests = list(open_workload(name, seed=1, count=3 if name == "agent" else 15, rate=None))
    traces, _ = ended(requests, (gpu_spec("prefill"), 2), (gpu_spec("decode"), 2))
    assert {scheduled.request.id for scheduled in requests} <= {trace.id for trace in traces}
    assert len({trace.id for trace in traces}) == len(traces)


def test_a_conversation_goes_on_with_its_answers_and_finds_its_prefix() -> None:
    group = RequestClass("agent", 1.0, (20, 40), (10, 20), prefix=Prefix((200, 200)), turns=(5, 5), think_s=1.0)
    requests = list(scheduled_requests(Mix((group,)), seed=1, count=4, rate=0.05))
    traces, num_computed = ended(requests, (slow_spec(), 1))
    ids = {f"r{conversation}.{turn}" for conversation in range(4) for turn in range(1, 6)}
    assert {trace.id for trace in traces} == ids
    # 200 shared tokens once, 30 of each turn, and of each turn what fills no block: at most 15 and an answer's last.
    assert 200 + 20 * 20 <= num_computed <= 200 + 20 * (40 + 16 + 1)
