"""Define the flags of `tandem doctor`, without importing what the command needs."""

from __future__ import annotations

import argparse


def add_doctor_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    command.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    command.add_argument("--url", default="", help="URL of a running gateway to check as well")
    command.add_argument("--only", metavar="CHECK,...", default="", help="run only these checks")
    pairs = command.add_mutually_exclusive_group()
    pairs.add_argument("--pairs", action="store_true", help="measure the links of a few pairs of workers")
    pairs.add_argument("--all-pairs", action="store_true", help="measure every pair of workers in both directions")
