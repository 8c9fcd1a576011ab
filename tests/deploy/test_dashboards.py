"""Dashboards ask for series that exist and lead to boards that exist; whether there is data in them only a real
Prometheus can tell."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tandem.obs.metrics.instruments import all_instruments
from tandem.obs.metrics.prometheus import prometheus_name
from tests.deploy.files import ROOT, Query, dashboards, known_series, panel_queries, panels, rule_queries, rules
from tests.deploy.promql import names_in

HTTP = ROOT / "docs" / "http.md"
KNOWN = known_series()
UIDS = {board["uid"] for board in dashboards()}
BOARDS = pytest.mark.parametrize("board", dashboards(), ids=lambda board: board["uid"])


def unknown_names(expression: str) -> set[str]:
    """Metrics and labels that nothing has. A label that is grouped by must be one of some series of the expression."""
    found = names_in(expression)
    known = [KNOWN[one.metric] for one in found.selectors if one.metric in KNOWN]
    wrong = {one.metric for one in found.selectors if one.metric not in KNOWN}
    wrong |= {label for one in found.selectors for label in one.labels - KNOWN.get(one.metric, one.labels)}
    return wrong | (found.grouped - frozenset[str]().union(*known))


@pytest.mark.parametrize("query", [*panel_queries(), *rule_queries()], ids=lambda query: query.where)
def test_every_name_exists(query: Query) -> None:
    assert unknown_names(query.expression) == set()
    assert names_in(query.expression).selectors or query.expression.startswith("vector("), "it asks for nothing"


def test_a_name_that_does_not_exist_is_found() -> None:
    assert unknown_names("sum by (nobody) (rate(tandem_nothing_total[1m]))") == {"nobody", "tandem_nothing_total"}
    assert unknown_names('tandem_ready{lane="batch"}') == {"lane"}


def test_every_figure_is_on_a_board() -> None:
    """A worker's info is in what variables offer."""
    queries = [query.expression for query in panel_queries()]
    queries += [one["query"]["query"] for board in dashboards() for one in board["templating"]["list"][1:]]
    shown = {selector.metric for query in queries for selector in names_in(query).selectors}
    names = {prometheus_name(instrument) for instrument in all_instruments()}

    assert {name for name in names if not shown & {name, f"{name}_bucket", f"{name}_sum"}} == set()


def test_boards_have_distinct_titles_and_uids() -> None:
    assert len(UIDS) == len(dashboards()) == 7
    assert len({board["title"] for board in dashboards()}) == 7


@BOARDS
def test_variables_are_values_of_labels_that_exist(board: dict[str, Any]) -> None:
    source, *variables = board["templating"]["list"]
    assert (source["type"], source["name"]) == ("datasource", "DS_PROMETHEUS")
    for variable in variables:
        matched = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert matched and matched[2] == variable["name"] and unknown_names(matched[1]) == set()
        assert variable["name"] in KNOWN[names_in(matched[1]).selectors[0].metric]


@pytest.mark.parametrize("query", panel_queries(), ids=lambda query: query.where)
def test_a_namespace_can_be_chosen_for_every_figure(query: Query) -> None:
    """But for the objective, which is the same for all. Sums add the chosen ones up; the largest of several means
    nothing, unless it is of one worker."""
    for series in names_in(query.expression).selectors:
        assert "namespace" in series.labels or series.metric == "tandem:slo_objective:ratio", series
    assert not re.findall(r"\b(?:min|max)\b(?! by \((?:namespace|worker)\b)", query.expression)


@BOARDS
def test_queries_use_the_board_s_variables_and_no_others(board: dict[str, Any]) -> None:
    own = {variable["name"] for variable in board["templating"]["list"][1:]} | {"__rate_interval", "__range"}
    used = {name for panel in board["panels"] for target in panel.get("targets", ()) for name in words(target["expr"])}
    assert used <= own and own - {"__range"} <= used | {"__range"}


def words(expression: str) -> set[str]:
    return set(re.findall(r"\$(\w+)", expression))


@BOARDS
def test_panels_neither_overlap_nor_leave_the_board(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and all(0 <= x < 24 for x, _ in cells)
        taken |= cells
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("panel", [panel for _, panel in panels()], ids=[where for where, _ in panels()])
def test_a_panel_has_a_title_and_a_description(panel: dict[str, Any]) -> None:
    assert "Good" in panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
    assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None
    assert panel["datasource"]["uid"] == "${DS_PROMETHEUS}"
    assert all(target["legendFormat"] for target in panel["targets"])


def test_panel_titles_of_a_board_are_distinct() -> None:
    places = [where for where, _ in panels()]
    assert len(set(places)) == len(places) > 60


def test_the_reasons_that_are_good_are_those_that_placements_have() -> None:
    (panel,) = (panel for _, panel in panels() if panel["title"] == "Placements on one worker by reason")
    (written,) = re.findall(
        r"^- The reasons after `local;reason=`.*?After\s", HTTP.read_text(), re.MULTILINE | re.DOTALL
    )
    reasons = set(re.findall(r"`(\w+)`", written))
    assert len(reasons) == 4 and all(re.search(rf"Good:[^.]*\b{reason}\b", panel["description"]) for reason in reasons)


def test_links_lead_to_boards() -> None:
    urls = [link["url"] for board in dashboards() for link in board["links"]]
    urls += [link["url"] for _, panel in panels() for link in panel["links"]]
    led = {re.sub(r"\?.*", "", url).removeprefix("/d/") for url in urls}
    assert led == UIDS
    assert {rule["annotations"]["dashboard"] for rule in rules("alert")} <= UIDS
