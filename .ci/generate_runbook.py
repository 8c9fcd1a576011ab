"""Generates deploy/RUNBOOK.md from deploy/prometheus/alerts.yaml, where each thing to do is said once; never judges it.

`--check` writes nothing and exits 1 when the committed file is not what would be written.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from committed import keep

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "deploy"
SOURCE = TARGET / "prometheus" / "alerts.yaml"
WIDTH = 155
"""Columns of a line."""
HEAD = """# Runbook

<!-- Written by `make runbook` from prometheus/alerts.yaml: change it there. -->

What each alert means, what to look at and what to do. `page`: users are hurt now. `ticket`: they will be, or capacity
is lost. `info`: good to know.

On Kubernetes, where release and namespace are `tandem`:

```console
$ kubectl -n tandem get rayservice,pods -o wide
$ kubectl -n tandem logs -l app.kubernetes.io/component=gateway --prefix --tail=-1 --since=15m
$ kubectl -n tandem exec POD -c ray-worker -- bash -c 'tail -n 200 /tmp/ray/session_latest/logs/serve/*.log'
$ kubectl -n tandem exec deploy/tandem-gateway -- tandem role --config /etc/tandem/config.yaml
$ kubectl -n tandem exec deploy/tandem-gateway -- tandem drain WORKER --timeout 60 --config /etc/tandem/config.yaml
$ kubectl -n tandem exec deploy/tandem-gateway -- tandem doctor --all-pairs --config /etc/tandem/config.yaml
$ kubectl -n tandem logs deploy/tandem-planner --since=15m                # with planner.enabled
```

A worker's name begins with its pod's, where pods have the nodes' network with its node's. `kubectl delete pod POD`
drains its workers and ends them; KubeRay starts another pod. More workers, another setting or the release before:
[README.md](README.md).
"""


def main() -> int:
    return keep("Generate the runbook.", TARGET, "RUNBOOK.md", generate, "make runbook")


def generate() -> dict[str, str]:
    groups = yaml.safe_load(SOURCE.read_text())["groups"]
    return {"RUNBOOK.md": "\n".join([HEAD, *contents(groups), *(line for group in groups for line in chapter(group))])}


def contents(groups: list[dict[str, Any]]) -> Iterator[str]:
    """A table of all alerts."""
    yield "| alert | severity | board |\n|---|---|---|"
    for rule in (rule for group in groups for rule in group["rules"]):
        name, board = rule["alert"], rule["annotations"]["dashboard"]
        yield f"| [{name}](#{name.lower()}) | {rule['labels']['severity']} | {board} |"
    yield ""


def chapter(group: dict[str, Any]) -> Iterator[str]:
    yield f"## {group['name'].removeprefix('tandem-').capitalize()}\n"
    for rule in group["rules"]:
        told = rule["annotations"]
        yield f"### {rule['alert']}\n"
        when = f"{rule['labels']['severity']}, after {rule['for']}; board `{told['dashboard']}`"
        yield f"**{summary(told['summary'])}** ({when})\n"
        yield f"{filled(told['runbook'])}\n"
        yield f"```promql\n{filled(rule['expr'])}\n```\n"


def filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def summary(template: str) -> str:
    """For people: labels by their names, and figures as N."""
    named = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda label: label[1].upper(), template)
    return re.sub(r"\{\{ \$value[^}]*\}\}", "N", named.replace("| humanizePercentage }}", "}} %"))


if __name__ == "__main__":
    sys.exit(main())
