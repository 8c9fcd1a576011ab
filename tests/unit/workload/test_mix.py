"""Test shares, lengths, arrivals and shared prefixes of mixes, all functions of the seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.workload.arrivals import Batches, Bursts, Constant
from tandem.workload.lengths import LogNormal
from tandem.workload.mix import EXACT_AMONG, Mix, poisson, scheduled_requests
from tandem.workload.request_class import Prefix, RequestClass
from tandem.workload.scheduled_request import ScheduledRequest
from tandem.workload.seeded_random import HIGHEST_TOKEN, LOWEST_TOKEN

GROUPS = (
    RequestClass("short", 0.7, (64, 200), (32, 64)),
    RequestClass("medium", 0.2, (550, 650), (32, 64)),
    RequestClass("long", 0.1, (2400, 2600), (1, 1)),
)
ONE = RequestClass("one", 1.0, (40, 40), (1, 1))
ENGINE_BLOCK = 16


def first(mix: Mix, count: int, seed: int = 1, rate: float | None = 5.0, salt: str = "") -> list[ScheduledRequest]:
    return list(scheduled_requests(mix, seed, count, rate, salt))


def prompts(requests: list[ScheduledRequest]) -> list[tuple[int, ...]]:
    return [scheduled.request.prompt_tokens for scheduled in requests]


def without_tokens(scheduled: ScheduledRequest) -> tuple[object, ...]:
    request = scheduled.request
    return (
        scheduled.group,
        scheduled.tenant,
        scheduled.due_s,
        len(request.prompt_tokens),
        request.sampling,
        request.priority,
        request.id,
    )


# ---- shares and lengths


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 99))
def test_each_group_has_its_share_of_every_few_requests(parts: list[int], seed: int) -> None:
    shares = [part / sum(parts) for part in parts]
    mix = Mix(tuple(RequestClass(str(i), share, (1, 1), (1, 1)) for i, share in enumerate(shares)))
    groups = [scheduled.group for scheduled in first(mix, 3 * EXACT_AMONG, seed)]
    for start in range(0, 3 * EXACT_AMONG, EXACT_AMONG):
        found = Counter(groups[start : start + EXACT_AMONG])
        assert all(abs(found[str(i)] - share * EXACT_AMONG) < 1 + 1e-9 for i, share in enumerate(shares))


@pytest.mark.slow
def test_integral_shares_are_exact_and_others_hold_in_the_long_run() -> None:
    exact = Counter(scheduled.group for scheduled in first(Mix(GROUPS), 10 * EXACT_AMONG))
    assert exact == {"short": 140, "medium": 40, "long": 20}
    rare = (RequestClass("rare", 0.013, (1, 1), (1, 1)), RequestClass("usual", 0.987, (1, 1), (1, 1)))
    assert Counter(scheduled.group for scheduled in first(Mix(rare), 10_000))["rare"] == pytest.approx(130, rel=0.15)


def test_the_order_of_groups_is_random() -> None:
    orders = [tuple(scheduled.group for scheduled in first(Mix(GROUPS), EXACT_AMONG, seed)) for seed in range(20)]
    assert len(set(orders)) == 20


def test_lengths_and_tokens_lie_in_their_ranges() -> None:
    requests = first(Mix(GROUPS), 400)
    limits = {group.name: group for group in GROUPS}
    for scheduled in requests:
        low, high = limits[scheduled.group].prompt
        assert low <= len(scheduled.request.prompt_tokens) <= high
        assert (
            limits[scheduled.group].output[0]
            <= scheduled.request.sampling.max_tokens
            <= limits[scheduled.group].output[1]
        )
    short = [len(prompt) for prompt in prompts(requests) if len(prompt) <= 200]
    assert fmean(short) == pytest.approx(132, rel=0.05) and min(short) < 70 and max(short) > 194
    tokens = {token for prompt in prompts(requests) for token in prompt}
    assert min(tokens) >= LOWEST_TOKEN and max(tokens) < HIGHEST_TOKEN
    assert len(tokens) > 0.9 * (HIGHEST_TOKEN - LOWEST_TOKEN)


def test_tenant_and_lane_go_with_the_group() -> None:
    (scheduled,) = first(Mix((replace(ONE, tenant="acme", priority=-3),)), 1)
    assert (scheduled.tenant, scheduled.request.priority) == ("acme", -3)


# ---- a function of the seed


def test_equal_seeds_give_equal_requests_and_others_share_nothing() -> None:
    requests = first(Mix(GROUPS), 60)
    assert first(Mix(GROUPS), 60) == requests
    assert first(Mix(GROUPS), 90)[:60] == requests
    other = first(Mix(GROUPS), 60, seed=2)
    assert len({prompt[:ENGINE_BLOCK] for prompt in prompts(requests) + prompts(other)}) == 120


def test_another_rate_gives_the_same_requests_at_other_times() -> None:
    slow, fast = first(Mix(GROUPS), 60, rate=1.0), first(Mix(GROUPS), 60, rate=10.0)
    assert [replace(scheduled, due_s=0.0) for scheduled in slow] == [
        replace(scheduled, due_s=0.0) for scheduled in fast
    ]
    assert slow[-1].due_s == pytest.approx(10 * fast[-1].due_s)


def test_another_salt_changes_all_tokens_and_nothing_else() -> None:
    mix = Mix((replace(ONE, share=0.5, prefix=Prefix((32, 64), 3)), RequestClass("two", 0.5, (20, 90), (1, 9))))
    usual, salted = first(mix, 40), first(mix, 40, salt="again")
    assert [without_tokens(scheduled) for scheduled in usual] == [without_tokens(scheduled) for scheduled in salted]
    assert not blocks(prompts(usual)) & blocks(prompts(salted))


def test_a_mix_is_generated_lazily_and_without_end() -> None:
    mix = Mix((replace(ONE, share=0.5), replace(ONE, name="own", share=0.5, arrivals=Batches(3))))
    endless = scheduled_requests(mix, seed=1, rate=1.0)
    assert len(list(islice(endless, 1000))) == 1000
    assert next(endless).request.id == "r1000"


# ---- arrivals


@pytest.mark.slow
def test_a_group_with_its_own_arrivals_is_independent_of_the_others() -> None:
    mix = Mix((replace(ONE, share=0.6), RequestClass("batch", 0.4, (1, 1), (1, 1), arrivals=Batches(50))))
    requests = first(mix, 5000, rate=10.0)
    due = [scheduled.due_s for scheduled in requests]
    assert due == sorted(due) and [scheduled.request.id for scheduled in requests] == [f"r{n}" for n in range(5000)]
    of_batch = Counter(scheduled.due_s for scheduled in requests if scheduled.group == "batch")
    assert set(of_batch.values()) <= {50, Counter(due)[due[-1]]}, "whole but for the last, which the count may cut"
    assert sum(of_batch.values()) / 5000 == pytest.approx(0.4, abs=0.06)
    alone = [scheduled for scheduled in requests if scheduled.group == "one"]
    assert len(alone) / due[-1] == pytest.approx(6.0, rel=0.1)


def test_shares_of_groups_with_common_arrivals_are_exact_among_themselves() -> None:
    own = RequestClass("own", 0.5, (1, 1), (1, 1), arrivals=Constant())
    mix = Mix((replace(ONE, share=0.3), replace(ONE, name="two", share=0.2), own))
    together = [scheduled.group for scheduled in first(mix, 100) if scheduled.group != "own"][:EXACT_AMONG]
    assert Counter(together) == {"one": 12, "two": 8}


def test_at_rate_0_all_arrive_at_once_with_all_shares() -> None:
    mix = Mix((replace(ONE, share=0.5), replace(ONE, name="own", share=0.5, arrivals=Batches(4))))
    requests = first(mix, 2 * EXACT_AMONG, rate=0.0)
    assert {scheduled.due_s for scheduled in requests} == {0.0}
    assert Counter(scheduled.group for scheduled in requests) == {"one": EXACT_AMONG, "own": EXACT_AMONG}


def test_the_rate_of_the_call_wins_and_one_is_needed() -> None:
    mix = Mix((ONE,), Constant(), rate=4.0)
    assert [scheduled.due_s for scheduled in first(mix, 2, rate=None)] == [0.0, 0.25]
    assert [scheduled.due_s for scheduled in first(mix, 2, rate=2.0)] == [0.0, 0.5]
    for rate in (None, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="a rate of requests per second is needed"):
            scheduled_requests(Mix((ONE,)), 1, 1, rate)


# ---- what prompts share


def blocks(several: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return all full blocks of the prompts."""
    return {
        prompt[start : start + ENGINE_BLOCK]
        for prompt in several
        for start in range(0, len(prompt) - ENGINE_BLOCK + 1, ENGINE_BLOCK)
    }


def test_without_a_prefix_no_two_blocks_are_equal() -> None:
    requests = prompts(first(Mix(GROUPS), 200))
    assert len(blocks(requests)) == sum(len(prompt) // ENGINE_BLOCK for prompt in requests)


def test_a_system_prompt_is_shared_within_its_group_only() -> None:
    with_prefix = RequestClass("agent", 0.5, (30, 60), (1, 1), prefix=Prefix((100, 100)))
    requests = first(Mix((with_prefix, replace(with_prefix, name="other"))), 100)
    by_group = {
        name: prompts([scheduled for scheduled in requests if scheduled.group == name]) for name in ("agent", "other")
    }
    starts = {name: {prompt[:100] for prompt in found} for name, found in by_group.items()}
    assert [len(start) for start in starts.values()] == [1, 1] and starts["agent"] != starts["other"]
    rests = [prompt[100:] for found in by_group.values() for prompt in found]
    assert all(30 <= len(rest) <= 60 for rest in rests)
    assert len({rest[:ENGINE_BLOCK] for rest in rests}) == 100


@pytest.mark.parametrize("zipf", [0.0, 1.0, 2.0])
def test_documents_are_chosen_by_popularity(zipf: float) -> None:
    mix = Mix((RequestClass("rag", 1.0, (1, 1), (1, 1), prefix=Prefix((20, 40), 50, zipf)),))
    found = Counter(prompt[:-1] for prompt in prompts(first(mix, 4000)))
    weights = [rank**-zipf for rank in range(1, 51)]
    assert len(found) <= 50 and {len(document) for document in found} <= set(range(20, 41))
    assert found.most_common(1)[0][1] / 4000 == pytest.approx(weights[0] / sum(weights), rel=0.35)
    assert sum(number for _, number in found.most_common(10)) / 4000 == pytest.approx(
        sum(weights[:10]) / sum(weights), abs=0.06
    )
    if zipf == 0:
        assert len(found) == 50


# ---- conversations

AGENT = RequestClass("agent", 1.0, (5, 9), (3, 3), prefix=Prefix((50, 50)), turns=(4, 4), think_s=2.0)


def turns(opening: ScheduledRequest, answer_seconds: float) -> list[ScheduledRequest]:
    """Return a whole conversation, each output of as many tokens as requested, all 7."""
    conversation = [opening]
    while (follow := conversation[-1].follow) is not None:
        conversation.append(
            follow([7] * conversation[-1].request.sampling.max_tokens, conversation[-1].due_s + answer_seconds)
        )
    return conversation


def test_each_turn_repeats_the_conversation_and_adds_to_it() -> None:
    (opening,) = first(Mix((AGENT,)), 1)
    conversation = turns(opening, answer_seconds=10.0)
    assert [scheduled.request.id for scheduled in conversation] == ["r0.1", "r0.2", "r0.3", "r0.4"]
    for before, after in pairwise(prompts(conversation)):
        assert after[: len(before) + 3] == (*before, 7, 7, 7)
        assert 5 <= len(after) - len(before) - 3 <= 9
    assert all(b.due_s > a.due_s + 10.0 for a, b in pairwise(conversation))
    assert {scheduled.group for scheduled in conversation} == {"agent"}
    assert len({scheduled.request.sampling.seed for scheduled in conversation}) == 4


def test_a_conversation_is_a_function_of_its_seed_and_outputs() -> None:
    several = first(Mix((AGENT,)), 5)
    at_once = [turns(opening, 1.0) for opening in several]
    backwards = [turns(opening, 1.0) for opening in reversed(first(Mix((AGENT,)), 5))]
    plain = [[replace(scheduled, follow=None) for scheduled in conversation] for conversation in at_once]
    assert [
        [replace(scheduled, follow=None) for scheduled in conversation] for conversation in reversed(backwards)
    ] == plain


def test_think_times_have_their_mean_and_turns_their_range() -> None:
    talkative = replace(AGENT, turns=(1, 5), output=(1, 50))
    conversation = [turns(opening, 1.0) for opening in first(Mix((talkative,)), 400)]
    assert Counter(map(len, conversation)).keys() == {1, 2, 3, 4, 5}
    waits = [b.due_s - a.due_s - 1.0 for one in conversation for a, b in pairwise(one)]
    assert fmean(waits) == pytest.approx(2.0, rel=0.15)
    assert all(one[0].request.id.endswith(".1") for one in conversation), "of one turn, but a conversation all the same"
    assert len({scheduled.request.sampling.max_tokens for scheduled in max(conversation, key=len)}) > 1, (
        "each turn has its own length"
    )


# ---- figures that can't be


def test_groups_and_mixes_refuse_impossible_values() -> None:
    with pytest.raises(ValueError, match=r"add up to 1, got \[0.7, 0.2\], which makes 0.9"):
        poisson(GROUPS[:2], 1, 1, 1.0)
    with pytest.raises(ValueError, match="different names"):
        Mix((replace(ONE, share=0.5), replace(ONE, share=0.5)))
    for changes, message in [
        ({"name": ""}, "must have a name"),
        ({"share": 0.0}, "share must be"),
        ({"think_s": -1.0}, "think_s must not"),
        ({"prompt": (9, 3)}, r"inverted, got \[9, 3\]"),
        ({"output": (0, 3)}, r"within \[1, "),
    ]:
        with pytest.raises(ValueError, match=message):
            replace(ONE, **changes)
    for prefix in [{"num_documents": 0}, {"zipf": -1.0}, {"num_tokens": (5, 4)}]:
        with pytest.raises(ValueError, match="got"):
            Prefix(**{"num_tokens": (1, 1), **prefix})
    for arrivals in [lambda: Bursts(0.0, 1.0), lambda: Bursts(1.0, 1.0, 1.0), lambda: Batches(0)]:
        with pytest.raises(ValueError, match="got"):
            arrivals()
    with pytest.raises(ValueError, match="median"):
        LogNormal(5.0, 1.0, 6, 9)
