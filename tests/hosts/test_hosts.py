"""Test a cluster on several hosts, whose links are cut, slow, late and lossy, and whose hosts are drained and lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count

import pytest

from tests.e2e.gateway.http import Post, begin_streams, completion
from tests.e2e.gateway.processes import until
from tests.hosts.cluster import Hosts, findings_of, reasons_of

pytestmark = pytest.mark.timeout(240)
NUM_STREAMS = 4


@pytest.fixture(autouse=True)
def whole(hosts: Hosts) -> None:
    hosts.network["b"].impair()
    hosts.wait_whole()


def test_a_prompt_computed_on_one_host_is_continued_on_another(hosts: Hosts) -> None:
    reply = hosts.complete(1)
    assert reply["status"] == 200 and reply["path"] == "remote"
    assert reasons_of(reply)["prefill"] == "wa" and reasons_of(reply)["decode"] in ("wb", "wc")
    assert reply["choices"][0]["text"] == hosts.text(1, split=False)


def streams(hosts: Hosts, first: int, meanwhile: Callable[[], None]) -> None:
    """Do `meanwhile` in the middle of streams, and check that all end with the text that they have without."""
    salts = range(first, first + NUM_STREAMS)
    expected = [hosts.text(salt, max_tokens=150) for salt in salts]
    with ExitStack() as stack:
        posts = begin_streams(stack, hosts.gateway.url, [completion(300, salt, 150) for salt in salts], 5)
        meanwhile()
        with ThreadPoolExecutor(NUM_STREAMS) as readers:
            answers = list(readers.map(Post.finish, posts))
    assert [answer.error() for answer in answers] == [None] * NUM_STREAMS
    assert [answer.text() for answer in answers] == expected


@pytest.mark.nightly
def test_a_host_is_drained(hosts: Hosts) -> None:
    worker = hosts.workers["c"]
    streams(hosts, 100, lambda: worker.signal(15))  # type: ignore[arg-type]
    assert worker.wait() == 0
    hosts.start_worker("c", "decode").wait_ready()


@pytest.mark.nightly
def test_a_host_is_lost(hosts: Hosts) -> None:
    def lose() -> None:
        hosts.network["c"].unplug()
        hosts.workers["c"].kill()

    streams(hosts, 200, lose)
    hosts.network["c"].plug_in()
    hosts.start_worker("c", "decode").wait_ready()


@pytest.mark.nightly
def test_a_link_is_cut_between_two_hosts_that_live(hosts: Hosts) -> None:
    a, b = hosts.network["a"], hosts.network["b"]
    a.blackhole_route_to(b)
    try:
        with ThreadPoolExecutor(NUM_STREAMS) as senders:
            replies = list(senders.map(hosts.complete, range(300, 300 + 3 * NUM_STREAMS)))
        assert [reply["status"] for reply in replies] == [200] * len(replies)
        # What was placed across the cut link once is placed elsewhere from then on.
        later = [hosts.complete(salt) for salt in range(400, 404)]
        assert all(reply["status"] == 200 and reply["tandem"]["attempts"] == 1 for reply in later)
    finally:
        a.restore_route_to(b)
    for reply, salt in zip(replies, range(300, 312), strict=True):
        assert reply["choices"][0]["text"] == hosts.text(salt, split=False)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "quality", [{"delay_s": 0.05}, {"loss": 0.01}, {"bytes_per_s": 12.5e6}], ids=["100ms", "1percent", "100Mbit"]
)
def test_no_request_fails_over_a_bad_link(hosts: Hosts, quality: dict[str, float]) -> None:
    expected = [hosts.text(salt, split=False) for salt in range(500, 512)]
    hosts.network["b"].impair(**quality)
    with ThreadPoolExecutor(NUM_STREAMS) as senders:
        replies = list(senders.map(hosts.complete, range(500, 512)))
    assert [reply["status"] for reply in replies] == [200] * 12
    assert [reply["choices"][0]["text"] for reply in replies] == expected


@pytest.mark.nightly
def test_the_better_link_is_preferred_in_the_end(hosts: Hosts) -> None:
    hosts.network["b"].impair(bytes_per_s=1e6)

    # A prompt that was answered before is in the cache of a decode worker, which then answers it alone.
    salts = count(600)

    def chosen() -> list[str]:
        replies = [hosts.complete(next(salts), length=2000, max_tokens=2) for _ in range(4)]
        return [reasons_of(reply)["decode"] for reply in replies if reply["path"] == "remote"]

    until(lambda: set(chosen()) == {"wc"}, "hand-offs over the better link alone", patience_s=180)


@pytest.mark.nightly
def test_the_doctor_names_every_link_and_the_slow_one(hosts: Hosts) -> None:
    hosts.network["b"].impair(bytes_per_s=12.5e6)
    done = hosts.tandem("doctor", "--only", "pairs", "--all-pairs", "--json", "--transfer-min-gbps", "0.05")
    found = findings_of(done.stdout)
    pairs = {(each["figures"]["consumer"], each["figures"]["producer"]): each for each in found}
    assert len(pairs) == 6, found
    assert all(each["figures"]["link_type"] == "tcp" for each in found)
    slow = {pair for pair, each in pairs.items() if each["verdict"] != "ok"}
    assert slow == {pair for pair in pairs if "wb" in pair}, found
