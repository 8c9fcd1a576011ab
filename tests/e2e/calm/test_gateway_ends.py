"""Test a gateway that is told to stop: it accepts no request, running streams finish, and the exit code is 0."""

from __future__ import annotations

import signal

from tests.e2e.gateway.http import Post, completion, send
from tests.e2e.gateway.pair import Pair
from tests.e2e.gateway.processes import until


def test_open_streams_end_and_new_requests_are_refused(calm: Pair) -> None:
    gateway = calm.cluster.gateway("ending")
    gateway.wait_serving()
    with Post(gateway.url, completion(40, 900, 1500, stream=True)) as post:
        post.wait_events(5)
        gateway.signal(signal.SIGTERM)

        def refused() -> bool:
            answer = send(gateway.url, completion(4, 901, 1))
            return answer.status == 503 and answer.json()["error"]["code"] == "draining"

        until(refused, "a gateway that takes nothing new")
        answer = post.finish()
    assert answer.error() is None and answer.events()[-1] is None
    assert gateway.wait() == 0
    calm.wait_idle()
