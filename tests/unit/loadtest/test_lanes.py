"""A chat beside batch requests: what is offered, what counts, and clients that send aborted requests again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from loadtest.cluster.lanes import LANES, NO_LANES, PREEMPTING, Row, report_text
from loadtest.cluster.lanes_run import (
    BATCH,
    LOADS,
    MOST,
    AbortingClients,
    BatchLoad,
    ChatTrace,
    LaneOutcome,
    LaneRun,
    LaneSetup,
    capacity,
    requests,
)
from tandem.core.ids import RequestId
from tandem.core.lane import Lane
from tandem.core.request import Request, SamplingParams
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.workload.scheduled_request import MODEL, ScheduledRequest
from tests.simulation.clusters import cluster, gpu_spec

LONG = BatchLoad((64, 128), (3000, 3000), 5.0, (MOST,), 1.0, 2.0)


def scheduled(name: str, lane: Lane, due_s: float, num_output: int) -> ScheduledRequest:
    sampling = SamplingParams(max_tokens=num_output, seed=1)
    prompt = tuple(range(1000, 1200))
    request = Request(id=RequestId(name), model=MODEL, prompt_tokens=prompt, sampling=sampling, lane=lane)
    return ScheduledRequest(request, lane.name.lower(), due_s)


def yielding() -> Iterator[ScheduledRequest]:
    """Two batch requests on the two seats of a worker, one of which yields to an interactive one."""
    return iter(
        [
            scheduled("old", Lane.BATCH, 0.0, 200),
            scheduled("young", Lane.BATCH, 0.1, 200),
            scheduled("chat", Lane.INTERACTIVE, 0.5, 50),
        ]
    )


def test_an_aborted_request_is_sent_again_from_its_start_and_its_client_waits_longer() -> None:
    one, traces = cluster((gpu_spec(max_num_seqs=2), 1)), list[ClientTrace]()
    clients = AbortingClients(one)
    one.run(yielding(), traces.append)
    one.check()
    by_name = {trace.id: trace for trace in traces}
    aborted, again = by_name[RequestId("young")], by_name[RequestId("young+")]
    assert clients.num_aborted == 1 and clients.is_aborted(aborted.id) and not aborted.is_complete
    assert clients.is_retry(again.id) and len(again.token_times) == 200 and again.due_s >= aborted.ended_at
    assert clients.num_lost == len(aborted.token_times) > 0
    resumed_at = again.token_times[len(aborted.token_times)]
    assert clients.pause_s(again) == resumed_at - aborted.token_times[-1]
    assert clients.pause_s(by_name[RequestId("old")]) == 0.0 and by_name[RequestId("old")].is_complete


def test_a_client_that_does_not_abort_keeps_its_tokens() -> None:
    one, traces = cluster((gpu_spec(max_num_seqs=2), 1)), list[ClientTrace]()
    one.run(yielding(), traces.append)
    assert one.workers[0].engine.num_preempted == 1
    assert [trace.is_complete for trace in traces] == [True] * 3


def test_a_capacity_is_that_of_a_cluster_that_requests_wait_for() -> None:
    load = replace(LONG, output=(100, 300))
    flooded = LaneOutcome(10.0, num_batch_tokens=8000, num_queued=1)
    assert capacity(load, flooded) == 4.0
    with pytest.raises(ValueError, match="does not saturate"):
        capacity(load, replace(flooded, num_queued=0))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty chat requests, one every half second."""
    lines = [
        json.dumps({"timestamp": 500 * i, "input_length": 300, "output_length": 10, "hash_ids": [i]}) for i in range(40)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_the_chat_is_the_same_whatever_is_offered_beside_it(trace: Path) -> None:
    def chat(setup: LaneSetup, rate: float) -> list[ScheduledRequest]:
        found = islice(requests(LONG, setup, rate, ChatTrace(trace)), 40)
        return [one for one in found if one.group != BATCH][:5]

    alone = chat(NO_LANES, 0.0)
    assert len(alone) == 5 and chat(LANES, 9.0) == alone == chat(NO_LANES, 3.0)


def test_a_chat_may_begin_at_a_later_request_of_the_trace(trace: Path) -> None:
    whole, later = list(ChatTrace(trace).requests()), list(ChatTrace(trace, 30).requests())
    assert [one.request for one in later] == [one.request for one in whole[30:]]
    assert [one.due_s for one in later] == [0.5 * i for i in range(10)]


def test_only_lanes_give_batch_requests_a_lane_of_their_own() -> None:
    for setup, lane in ((LANES, Lane.BATCH), (NO_LANES, Lane.INTERACTIVE)):
        assert {one.request.lane for one in islice(requests(LONG, setup, 2.0, None), 5)} == {lane}


def test_a_run_counts_the_chat_and_the_tokens_of_its_window(trace: Path) -> None:
    """No batch request ends in the run. One sends at most a token per step of 3.5 ms or more."""
    found = LaneRun(LANES, LONG).run(requests(LONG, LANES, 2.0, ChatTrace(trace)))
    assert len(found.ttft_s) == 2 and len(found.gaps_s) == 18
    assert 100 < found.num_batch_tokens < 5 * 1.0 / 3.5e-3
    assert found.num_failed == found.num_yields == found.num_queued == 0


def row(setup: LaneSetup, offered: float, ttft_s: float, gap_s: float, num_tokens: int) -> Row:
    return Row(setup, offered, LaneOutcome(10.0, [ttft_s] * 2, [gap_s] * 2, num_tokens, num_queued=1))


def test_a_table_compares_the_chat_with_itself_alone_and_batch_with_one_lane() -> None:
    rows = [
        row(LaneSetup(name="alone"), 0.0, 0.2, 0.004, 0),
        row(NO_LANES, 0.0, 0.2, 0.004, 1000),
        row(NO_LANES, 4.0, 0.8, 0.008, 900),
        row(LANES, 4.0, 0.22, 0.005, 450),
    ]
    text = report_text("summaries", rows)
    assert "| one lane | 4 | 800 / 800 | 8.0 / 8.0 | 4.00, 2.00 | 90 | 100% |" in text
    assert "| lanes | 4 | 220 / 220 | 5.0 / 5.0 | **1.10**, 1.25 | 45 | 50% |" in text
    assert f"{100 / (sum(LOADS['summaries'].output) / 2):.1f} batch requests/s" in text
    assert "No request yields" in text
    assert "No request yields" not in report_text("answers", [*rows, row(PREEMPTING[0], 4.0, 0.3, 0.005, 400)])
