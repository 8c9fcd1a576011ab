"""Test that a prompt cached only at the decode worker is fetched from there by the prefill worker, through a real
gateway and two real workers: the same answer, with almost nothing computed.
"""

from __future__ import annotations

from tests.e2e.gateway.http import completion, send
from tests.e2e.gateway.pair import Pair
from tests.e2e.gateway.processes import until

LENGTH = 4000
BLOCK_TOKENS = 16


def test_a_prefix_of_the_decode_worker_is_fetched(calm: Pair) -> None:
    before = calm.gateway.metrics()["tandem_prefix_index_blocks"]
    whole = calm.complete(LENGTH, 7201, split=False)
    num_blocks = LENGTH // BLOCK_TOKENS
    until(lambda: calm.gateway.metrics()["tandem_prefix_index_blocks"] >= before + num_blocks - 1, "the index to know")
    answer = send(calm.gateway.url, completion(LENGTH, 7201, 8), headers={"x-tandem-explain": "1"})
    assert answer.path == "remote"
    reply = answer.json()
    (reasons,) = reply["tandem"]["reasons"]
    assert reasons["prefix"]["source"] == "d" and reasons["prefill"] == "p"
    assert reply["choices"][0]["text"] == whole.text()
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_blocks - 1) * BLOCK_TOKENS
    calm.wait_idle()
