"""Test real workers whose link misses its requirements: the pair is not used, requests fall back or are refused in
strict mode, and the reason is visible.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.gateway.http import completion, send
from tests.e2e.gateway.pair import SETTINGS, Pair
from tests.e2e.gateway.processes import PATIENCE_S, Gateway, cluster, until

PROBLEM = "the link from p to d is not used: transfer.min_gbps is 1e+06, the link carries "


def readiness(gateway: Gateway) -> dict[str, str]:
    answer: dict[str, str] = httpx.get(f"{gateway.url}/ready", timeout=PATIENCE_S, trust_env=False).json()
    return answer


def test_a_joining_worker_measures_its_prefill_workers(calm: Pair) -> None:
    (link,) = until(lambda: calm.decode.describe().links, "a report of the decode worker")
    assert (link.source.id, link.link_type) == (calm.prefill.name, "shared_memory")
    assert (link.problem, link.refused) == ("", False)
    assert link.num_bytes >= 64 << 20 or link.seconds >= 0.2
    series = 'tandem_transfer_links{link="shared_memory",ok="true"}'
    until(lambda: calm.gateway.metrics().get(series) == 1, "the gateway")
    assert not calm.prefill.describe().links, "nobody prefills for it"


@pytest.mark.nightly
def test_a_pair_slower_than_required_is_not_used(tmp_path: Path, redis_url: str, model: Path) -> None:
    settings = (*SETTINGS, "--namespace", "links", "--min-gbps", "1000000", "--no-worker-wait-s", "0")
    with cluster(tmp_path, redis_url, model, *settings) as running:
        prefill, decode = running.worker("p", "prefill"), running.worker("d", "decode")
        prefers, must = running.gateway("prefers"), running.gateway("must", "--disaggregation", "strict")
        for program in running.programs:
            program.wait_ready()
        prefers.wait_serving()
        until(lambda: PROBLEM in readiness(prefers).get("warning", ""), "the warning of who serves all the same")
        until(lambda: PROBLEM in (must.missing() or ""), "the reason of who does not")
        answer = send(prefers.url, completion(40, 1, 4))
        assert answer.status == 200
        assert answer.path == "fallback;reason=no_link_between_the_workers_meets_the_requirements"
        refused = send(must.url, completion(40, 1, 4))
        assert refused.status == 503
        assert "no link between the workers meets the requirements" in str(refused.error())
        assert prefers.metrics()['tandem_transfer_links{link="shared_memory",ok="false"}'] == 1
        (link,) = decode.describe().links
        assert (link.link_type, link.refused, link.source.id) == ("shared_memory", True, "p")
        assert link.num_bytes >= 8 << 20 and link.seconds > 0
        assert not prefill.describe().links, "nobody prefills for it"
        assert any("but transfer.min_gbps is 1e+06" in line for line in decode.complaints())
        for worker in (prefill, decode):
            until(worker.is_idle, f"an idle {worker.name}")
