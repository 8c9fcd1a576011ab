"""The arguments of `tandem doctor`; never looks at anything."""

from __future__ import annotations

import argparse


def add_doctor_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    command.add_argument("--strict", action="store_true", help="what is to be looked at fails too")
    command.add_argument("--url", default="", help="a running gateway to ask as well")
    command.add_argument("--only", metavar="CHECK,...", default="", help="look at these alone")
    pairs = command.add_mutually_exclusive_group()
    pairs.add_argument("--pairs", action="store_true", help="measure the links of a few pairs of workers")
    pairs.add_argument("--all-pairs", action="store_true", help="measure every pair of workers in both directions")
