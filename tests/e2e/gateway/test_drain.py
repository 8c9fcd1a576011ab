"""Test a decode worker that is told to stop while it streams: its sequences migrate to another worker token by token,
and nothing is computed again.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway.http import Answer, begin_streams, completion
from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import Cluster, cluster, until

pytestmark = pytest.mark.timeout(240)

NAMESPACE = "drain"
NUM_TOKENS = 400
FORM = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": NUM_TOKENS}
SAMPLING = {"temperature": 1.0, "top_p": 0.95, "seed": 17}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": SAMPLING,
    "penalties": {**SAMPLING, "presence_penalty": 0.7, "repetition_penalty": 1.2, "logprobs": 2},
    "choices": {**SAMPLING, "n": 3},
    "form": {
        **SAMPLING,
        "response_format": {"type": "json_schema", "json_schema": {"name": "colours", "schema": FORM}},
    },
}
NUM_SEQUENCES = sum(kind.get("n", 1) for kind in KINDS.values())


def bodies() -> list[dict[str, Any]]:
    indexed_kinds = enumerate(KINDS.values())
    return [
        completion(40 + index, 600 + index, NUM_TOKENS, return_token_ids=True, **kind) for index, kind in indexed_kinds
    ]


def sampled_choices(answer: Answer) -> dict[int, tuple[list[int], list[float], str]]:
    """Return for each choice its tokens, their log probabilities, and its finish reason."""
    assert answer.error() is None, answer.error()
    by_choice: dict[int, tuple[list[int], list[float], str]] = {}
    for event in answer.events():
        for choice in (event or {}).get("choices", ()):
            ids, logprobs, _ = by_choice.get(choice["index"], ([], [], ""))
            ids += choice.get("token_ids") or []
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())
            by_choice[choice["index"]] = ids, logprobs, choice["finish_reason"] or ""
    return by_choice


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, redis_url: str, model: Path) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("drain")
    own = ("--namespace", NAMESPACE, "--worker-drain-s", "60", "--worker-timeout-s", "30", "--gateway-grace-s", "30")
    with cluster(directory, redis_url, model, *SETTINGS, *own) as running:
        yield running


def test_all_streams_of_a_decode_worker_that_ends_go_on_at_another(running: Cluster, redis_url: str) -> None:
    """The other worker decodes only from then on, so that all sequences begin at the first."""
    prefill, leaving, taking = (
        running.worker(*arguments) for arguments in (("p", "prefill"), ("d", "decode"), ("t", "prefill"))
    )
    gateway = running.gateway("gateway", "--disaggregation", "prefer")
    running.wait_serving()
    with ExitStack() as stack:
        expected = [sampled_choices(post.finish()) for post in begin_streams(stack, gateway.url, bodies(), 0)]
        posts = begin_streams(stack, gateway.url, bodies(), 20)
        assert leaving.books().num_sequences == NUM_SEQUENCES
        # It is stopped meanwhile, because a fast worker would finish before another one exists.
        leaving.signal(signal.SIGSTOP)
        taking.assign_role(redis_url, NAMESPACE, "decode")
        until(lambda: gateway.num_live("decode") == 2, "a second decode worker")
        leaving.signal(signal.SIGTERM)
        leaving.signal(signal.SIGCONT)
        answers = [post.finish() for post in posts]
    assert leaving.wait() == 0
    assert [sampled_choices(answer) for answer in answers] == expected
    facts = [answer.about() for answer in answers]
    assert [(fact["path"], fact["attempts"]) for fact in facts] == [("remote;retries=1", 2)] * len(answers)
    assert f"{NUM_SEQUENCES} sequences moved to other workers, 0 went back to gateways, 0 are unfinished" in leaving.log
    for worker in (prefill, taking):
        until(worker.is_idle, f"an idle {worker.name}")
    assert running.log_lines("ERROR") == []
