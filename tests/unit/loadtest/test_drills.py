"""Drills send what their setups say, and the people who wait send the same in each."""

from __future__ import annotations

import pytest

from loadtest.cluster.drills import DRILLS, Drill, DrillOutcome, DrillSetup, drill_requests, drill_text, render
from tandem.core.lane import Lane
from tandem.workload.scheduled_request import ScheduledRequest

COUNT = 60


def sent(drill: Drill, setup: DrillSetup) -> tuple[list[ScheduledRequest], list[ScheduledRequest]]:
    """Return the requests of the people who wait, and of the others."""
    found = list(drill_requests(drill, setup, COUNT))
    return [one for one in found if one.group == drill.people], [one for one in found if one.group != drill.people]


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.mix)
def test_the_people_who_wait_send_the_same_in_each_setup(drill: Drill) -> None:
    (alone, nobody), *beside = [sent(drill, setup) for setup in drill.setups]
    assert alone and not nobody
    assert all(people == alone and others for people, others in beside)


def test_without_lanes_and_tenants_the_others_share_those_of_the_people() -> None:
    by_mix = {drill.mix: drill for drill in DRILLS}
    night, flood = by_mix["batch-night"], by_mix["flood"]
    assert [{one.request.lane for one in sent(night, setup)[1]} for setup in night.setups[1:]] == [
        {Lane.INTERACTIVE}, {Lane.BATCH},
    ]  # fmt: skip
    assert [{one.request.tenant for one in sent(flood, setup)[1]} for setup in flood.setups[1:]] == [
        {"acme"}, {"initech"},
    ]  # fmt: skip
    assert {one.request.tenant for one in sent(flood, flood.setups[1])[0]} == {"acme"}


def test_a_drill_is_a_row_for_each_setup_and_a_panel() -> None:
    drill = DRILLS[0]
    outcomes = [DrillOutcome([0.02 * i, 0.02 * i], [0.004 * i, 0.004 * i]) for i in (1, 2, 3)]
    assert "| lanes | 60.0 / 60.0 / 60.0 | 12.0 / 12.0 / 12.0 / 12.0 |" in drill_text(drill, outcomes)
    titles = [axes.get_title(loc="left") for axes in render({drill: outcomes}).axes if axes.get_visible()]
    assert titles == ["batch-night: chat"]
