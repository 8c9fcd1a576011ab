"""Test single steps of a worker group on plain values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.ray_worker_groups import WorkerGroup, read_groups
from tandem.planner.worker_group import GroupView, PodView, next_step


def group(replicas: int, *listed: str) -> GroupView:
    return GroupView(index=0, name="g", replicas=replicas, least=1, most=9, listed=listed)


def busy(name: str, num_jobs: int = 1) -> PodView:
    return PodView(name=name, num_jobs=num_jobs)


def leaving(name: str, *, is_empty: bool) -> PodView:
    return PodView(name=name, num_jobs=0, is_draining=True, is_empty=is_empty)


def test_it_grows_at_once_and_within_its_bounds() -> None:
    assert next_step(group(2), [busy("a"), busy("b")], 5).replicas == 5
    assert next_step(group(2), [busy("a")], 50).replicas == 9
    assert next_step(group(2), [busy("a"), busy("b")], 2) == next_step(group(2), [busy("a"), busy("b")], 2)
    assert not next_step(group(2), [busy("a"), busy("b")], 2).changes(group(2))


def test_draining_pods_are_added_within_the_bounds() -> None:
    pods = [busy("a"), busy("b"), busy("c"), leaving("d", is_empty=False)]
    assert next_step(group(4), pods, 5).replicas == 6
    assert next_step(group(4), pods, 9).replicas == 9
    pods += [busy("e"), busy("f")]
    pods[3] = leaving("d", is_empty=True)
    step = next_step(group(6), pods, 5)
    assert (step.replicas, step.listed, step.drain) == (5, ("d",), ())


def test_pods_with_the_fewest_jobs_drain_first() -> None:
    step = next_step(group(3), [busy("a", 5), busy("b", 1), busy("c", 3)], 2)
    assert step.drain == ("b",) and step.replicas == 3 and not step.changes(group(3))


def test_at_most_a_quarter_leaves_at_once() -> None:
    pods = [busy(name) for name in "abcdefgh"]
    assert next_step(group(8), pods, 1).drain == ("a", "b")
    pods[0] = leaving("a", is_empty=False)
    assert next_step(group(8), pods, 1).drain == ("b",)


def test_what_is_empty_goes_by_name_and_the_number_falls_with_it() -> None:
    pods = [busy("a"), busy("b"), leaving("c", is_empty=True), leaving("d", is_empty=False)]
    step = next_step(group(4), pods, 2)
    assert (step.replicas, step.listed) == (3, ("c",)) and step.changes(group(4))
    assert step.operations(group(4))[2]["value"] == {"workersToDelete": ["c"]}


def test_who_is_to_be_deleted_stays_named_until_it_is_gone() -> None:
    pods = [busy("a"), busy("b"), leaving("c", is_empty=True), leaving("d", is_empty=True)]
    pods[2] = PodView(name="c", num_jobs=0, is_ending=True)
    step = next_step(group(3, "c", "long-gone"), pods, 2)
    assert (step.replicas, step.listed) == (2, ("c", "d"))


def test_it_does_not_shrink_while_kuberay_is_behind() -> None:
    for pods in ([busy("a"), leaving("b", is_empty=True)], [busy("a"), busy("b"), busy("c"), busy("d")]):
        step = next_step(group(3), pods, 1)
        assert step.replicas == 3 and not step.drain and not step.changes(group(3))


def test_it_shrinks_although_its_number_exceeds_a_maximum_that_was_lowered() -> None:
    """KubeRay keeps the numbers of pods within the bounds, whatever `replicas` says."""
    spec = {"groupName": "g", "replicas": 6, "minReplicas": 1, "maxReplicas": 4}
    view = GroupView.of({"spec": {"workerGroupSpecs": [spec]}}, "g")
    assert view is not None and view.replicas == 4
    step = next_step(view, [busy(name) for name in "abcd"], 2)
    assert step.drain == ("a",)
    empty = leaving("a", is_empty=True)
    step = next_step(view, [empty, busy("b"), busy("c"), busy("d")], 2)
    assert (step.replicas, step.listed) == (3, ("a",)) and step.changes(view)
    raised = GroupView.of({"spec": {"workerGroupSpecs": [{**spec, "replicas": 0, "minReplicas": 2}]}}, "g")
    assert raised is not None and raised.replicas == 2


def test_pods_without_workers_go_first_but_for_the_spare_ones() -> None:
    young = [PodView(name=name, num_jobs=None, is_starting=True) for name in "yz"]
    assert next_step(group(4), [busy("a"), busy("b"), *young], 3).drain == ("y",)
    assert next_step(group(4), [busy("a"), busy("b"), *young], 3, num_spare=1).drain == ("z",)
    assert next_step(group(4), [busy("a"), busy("b"), *young], 3, num_spare=2).drain == ("a",)


def test_one_whose_worker_is_out_of_sight_stays() -> None:
    hidden = PodView(name="a", num_jobs=None)
    assert next_step(group(2), [hidden, busy("b", 9)], 1).drain == ("b",)
    assert next_step(group(2), [replace(hidden, is_draining=True), busy("b")], 1).listed == ()
    lost = replace(hidden, is_lost=True)
    assert next_step(group(2), [lost, busy("b", 9)], 1).drain == ("b",), "last of all"
    assert next_step(group(2), [lost, replace(hidden, name="b")], 1).drain == ("a",)
    assert next_step(group(2), [replace(lost, is_draining=True), busy("b")], 1).listed == ("a",)


def test_the_pods_of_a_worker_drain_together_or_not_at_all() -> None:
    pods = [replace(busy(name, 3), spanning_worker="wide") for name in "ab"]
    pods += [replace(busy(name, 1), spanning_worker="other") for name in "cd"]
    assert next_step(group(4), pods, 2, num_pods=2).drain == ("c", "d")
    pods[2:] = [replace(pod, is_draining=True) for pod in pods[2:]]
    assert next_step(group(4), pods, 2, num_pods=2).drain == (), "one worker at a time"


def test_pods_without_a_worker_leave_by_the_number_that_a_worker_takes() -> None:
    pods = [PodView(name=name, num_jobs=None, is_starting=True) for name in "abcde"]
    assert next_step(group(5), pods, 3, num_spare=1, num_pods=2).drain == ("b", "c")
    wide = GroupView(index=0, name="g", replicas=6, least=3, most=7)
    step = next_step(wide, [*pods, busy("f")], 2, num_pods=2)
    assert step.drain == ("a", "b") and "may have 4 to 6 pods, not 2" in step.reasons[0]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("prefill=a,decode=b", (WorkerGroup("prefill", "a"), WorkerGroup("decode", "b"))),
        (" decode=wide:4+1 ", (WorkerGroup("decode", "wide", num_workers=4, num_spare=1),)),
        ("prefill=a+2", (WorkerGroup("prefill", "a", num_spare=2),)),
        ("prefill=a/4+8", (WorkerGroup("prefill", "a", num_pods=4, num_spare=8),)),
        ("prefill=a:1/2", (WorkerGroup("prefill", "a", num_pods=2),)),
        ("prefill=a:2/2", None),
        ("prefill=a/0", None),
        ("prefill=a,prefill=b", None),
        ("prefill=a,decode=a", None),
        ("mixed=a", None),
        ("prefill=a:0", None),
        ("prefill=", None),
        ("prefill", None),
        ("", None),
    ],
)
def test_groups_are_read(text: str, groups: tuple[WorkerGroup, ...] | None) -> None:
    assert read_groups(text) == groups
