"""Provide texts to be edited by a model, each with the edit to make.

Random tokens show nothing about drafting by prompt lookup, so these are real sentences and real code, written for this
file.
"""

from __future__ import annotations

from typing import NamedTuple


class Passage(NamedTuple):
    edit: str
    text: str

    def prompt(self, number: int) -> str:
        """Return a prompt to rewrite the document, with the beginning of the answer given, so that a small model
        continues it.

        There is no chat template, so the prompt is the same for every model.
        """
        text = self.text.strip()
        return (
            f"Document {number}.\n\n### Task\nWrite the whole text again. {self.edit}\n\n"
            f"### Text\n{text}\n\n### The whole text again, edited\n{text[:_GIVEN]}"
        )


_GIVEN = 60
"""Number of characters of the answer that the prompt contains."""


def passages() -> tuple[Passage, ...]:
    return (
        Passage("Write kilometres instead of miles.", _HARBOUR),
        Passage("Call the function read_settings instead of load_config.", _SETTINGS),
        Passage("Write the names of the months in full.", _MINUTES),
        Passage("Correct the spelling.", _BEES),
        Passage("Use the class name Ledger instead of Account.", _ACCOUNT),
        Passage("Replace the word customers by the word guests.", _BAKERY),
    )


_HARBOUR = """
The old harbour lies three miles north of the town, where the river bends for the last time before it meets the sea.
Until the railway came, every sack of grain and every barrel of herring left the valley from its two stone piers. The
longer pier was built in 1781 by masons from the islands, who cut the blocks so well that no mortar was needed. The
shorter one is younger by a generation and has been repaired after every great storm since. When the wind stands in the
north-west, the swell runs straight into the basin, and the boats have to be moved to the inner quay, half a mile
upstream. Today the fishing fleet is gone, but the harbour master still keeps a log of the tides, the weather and the
few yachts that call in summer, and he will gladly show it to anybody who walks the five miles along the coast path.
"""

_SETTINGS = '''
import json
from pathlib import Path


def load_config(path: Path) -> dict[str, str]:
    """Read the settings from a JSON file. Missing files give the defaults."""
    settings = {"host": "127.0.0.1", "port": "8080", "log_level": "info"}
    if path.exists():
        settings.update(json.loads(path.read_text(encoding="utf-8")))
    return settings


def main() -> None:
    settings = load_config(Path("server.json"))
    print(f"listening on {settings['host']}:{settings['port']}")
    if settings["log_level"] == "debug":
        for name, value in sorted(settings.items()):
            print(f"{name} = {value}")


if __name__ == "__main__":
    main()
'''

_MINUTES = """
Minutes of the meeting of the library committee, 14 Sept. The committee met at seven in the reading room; six of its
eight members were present. The treasurer reported that the budget of the year has been used to seventy percent, and
that the repair of the roof, planned for Nov., will cost less than was feared in Aug. The librarian reported that the
number of loans has risen in every month since Jan., most of all for children's books, and asked for two more shelves
in the small room. The committee agreed that the shelves are to be ordered at once and paid from the fund for furniture.
The reading evenings will begin again in Oct. and take place on every second Tuesday until the end of Feb. The next
meeting of the library committee is on 9 Dec., at seven in the reading room.
"""

_BEES = """
A colony of honey bees in sumer holds one queen, a few hundred drones and some forty thousand workers. The workers do
diferent work at different ages: in the first days of their life they clean cells, then they feed the larvae, then they
build comb and receive the nectar that others bring, and only in the last three weeks of their life they fly out
themselves. A bee that has found a good place tells the others by a dance on the comb: the direction of the dance,
mesured against the vertical, is the direction of the flight, measured against the sun, and the length of the run is the
distance. In autum the workers drive the drones out of the hive, because there is nothing left for them to do. The bees
that are born then live until spring: they form a ball around the queen, warm it by trembling their muscles, and live
on the honey that the bees of the summer have gathered.
"""

_ACCOUNT = '''
class Account:
    """A list of amounts in cents, oldest first. The balance of an Account is never below its limit."""

    def __init__(self, owner: str, limit: int = 0) -> None:
        self.owner = owner
        self.limit = limit
        self.amounts: list[int] = []

    @property
    def balance(self) -> int:
        return sum(self.amounts)

    def deposit(self, amount: int) -> None:
        if amount <= 0:
            raise ValueError("the amount of a deposit must be positive")
        self.amounts.append(amount)

    def withdraw(self, amount: int) -> None:
        if amount <= 0:
            raise ValueError("the amount of a withdrawal must be positive")
        if self.balance - amount < self.limit:
            raise ValueError("the balance of the Account would be below its limit")
        self.amounts.append(-amount)
'''

_BAKERY = """
The bakery on the corner opens at five, long before the first customers come. At that hour the ovens have been hot for
two hours already, and the first loaves of rye bread lie on the boards by the window. The customers who come before six
are mostly people on their way to work: nurses from the hospital, drivers of the tram, porters from the market. They
know what they want and have the money ready. The customers who come between seven and eight are children on their way
to school, and with them everything takes longer, because there are eleven kinds of pastry behind the glass and only
one coin in the hand. After nine the old customers come, those who have lived in the street for forty years; they buy
half a loaf and stay for a quarter of an hour. By noon everything is sold, and the baker closes the door, sweeps the
floor and goes to bed.
"""
