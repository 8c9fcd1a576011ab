"""Run the crowded scenarios of many seeds, and print how often sequences were preempted and requests moved.

python -m tests.simulation.many_seeds FIRST STOP
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.simulation.faults import crowded_scenario, run


def main(first: int, stop: int) -> int:
    """Return the exit status: 1 if something that must hold did not hold for a seed, which is printed."""
    total = Counter[str]()
    for seed in range(first, stop):
        try:
            cluster, witness = run(crowded_scenario(seed))
        except Exception as error:
            sys.stdout.write(f"seed {seed}: {type(error).__name__}: {error}\n")
            sys.stdout.flush()
            total["failed seeds"] += 1
            continue
        total["seeds"] += 1
        total["requests"] += len(witness.paths)
        total["preemptions"] += sum(worker.engine.num_preempted for worker in cluster.workers)
        total["requests that were retried or moved"] += sum("retries=" in path for path in witness.paths)
        total["blocks in host memory at the end"] += sum(w.engine.books().num_host_blocks for w in cluster.workers)
    sys.stdout.write(", ".join(f"{number:,} {name}" for name, number in total.items()) + "\n")
    return 1 if total["failed seeds"] else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
