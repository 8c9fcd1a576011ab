"""Test the drawing of a Grafana dashboard with made-up data."""

from __future__ import annotations

from typing import Any

from loadtest.screenshots.board import render_board
from tests.deploy.files import dashboards

START_S, END_S = 1000.0, 1060.0


def test_every_panel_of_the_overview_is_rendered_with_its_series() -> None:
    """Variables are replaced in queries, and labels in legends."""
    queries: list[str] = []

    def query(expression: str) -> list[dict[str, Any]]:
        queries.append(expression)
        values = [[START_S, "NaN"], [START_S + 10, "0.25"], [START_S + 20, "0.5"]]
        return [{"metric": {"lane": "batch", "worker": "w-7"}, "values": values}]

    (board,) = (board for board in dashboards() if board["uid"] == "tandem-overview")
    figure = render_board(board, query, START_S, END_S)

    assert {axes.get_title(loc="left") for axes in figure.axes} == {
        panel["title"] for panel in board["panels"] if panel["type"] != "row"
    }
    assert queries and not any("$" in query for query in queries)
    by_title = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert [text.get_text() for text in by_title["Goodput"].texts] == ["batch", "50.0%"]
    (line,) = by_title["Time to first token by lane, p99"].lines
    assert list(line.get_xdata()) == [10.0, 20.0] and list(line.get_ydata()) == [0.25, 0.5]
    assert line.get_label() == "batch  500 ms"
