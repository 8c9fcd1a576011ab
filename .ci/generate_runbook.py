"""Generate deploy/RUNBOOK.md from the alerts and their instructions in deploy/prometheus/alerts.yaml.

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
"""Most columns of a line."""
TITLES = {
    "tandem-clients": "What clients see",
    "tandem-fleet": "Gateways and workers",
    "tandem-kv": "KV blocks and transfers",
    "tandem-scheduler": "Scheduler",
    "tandem-stores": "Redis and telemetry",
}
"""Chapter titles by the name of a group of alerts."""
HEAD = """# Runbook

<!-- Written by `make runbook` from prometheus/alerts.yaml: change it there. -->

This page says of each alert what it means, what to check and what to do. Names in quotes are panels of the dashboard
that the alert names, or of another one. Severity `page`: users are affected now. `ticket`: users will be affected, or
capacity is lost. `info`: it is good to know.

Commands on Kubernetes, where release and namespace are `tandem`:

```console
$ kubectl -n tandem get rayservice,pods -o wide
$ kubectl -n tandem logs -l app.kubernetes.io/component=gateway --prefix --tail=-1 --since=15m
$ kubectl -n tandem exec POD -c ray-worker -- bash -c 'tail -n 200 /tmp/ray/session_latest/logs/serve/*.log'
$ kubectl -n tandem exec deploy/tandem-gateway -- tandem role --config /etc/tandem/config.yaml
$ kubectl -n tandem exec deploy/tandem-gateway -- tandem drain WORKER --timeout 60 --config /etc/tandem/config.yaml
$ kubectl -n tandem exec deploy/tandem-gateway -- tandem doctor --all-pairs --config /etc/tandem/config.yaml
$ kubectl -n tandem logs deploy/tandem-planner --since=15m                # with planner.enabled
$ helm upgrade tandem helm/tandem -n tandem -f helm/tandem/ci/rdma-values.yaml -f my-values.yaml \\
    --set pools.prefill.replicas=3
```

A worker's name begins with the name of its pod, or of its node where pods use the host network. `kubectl delete pod
POD` drains and stops the pod's workers, and KubeRay starts another pod. The last command adds prefill workers to a
release that was installed with these files. [docs/kubernetes.md](../docs/kubernetes.md) says how to add
workers, change settings and roll back; [COMPOSE.md](COMPOSE.md) describes the containers of a single machine.
"""


def main() -> int:
    return keep("Generate the runbook.", TARGET, "RUNBOOK.md", generate, "make runbook")


def generate() -> dict[str, str]:
    groups = yaml.safe_load(SOURCE.read_text())["groups"]
    return {"RUNBOOK.md": "\n".join([HEAD, *contents(groups), *(line for group in groups for line in chapter(group))])}


def contents(groups: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of all alerts."""
    yield "| alert | severity | dashboard |\n|---|---|---|"
    for rule in (rule for group in groups for rule in group["rules"]):
        name, board = rule["alert"], rule["annotations"]["dashboard"]
        yield f"| [{name}](#{name.lower()}) | {rule['labels']['severity']} | {board} |"
    yield ""


def chapter(group: dict[str, Any]) -> Iterator[str]:
    yield f"## {TITLES[group['name']]}\n"
    for rule in group["rules"]:
        annotations = rule["annotations"]
        yield f"### {rule['alert']}\n"
        when = f"{rule['labels']['severity']}, after {rule['for']}; dashboard `{annotations['dashboard']}`"
        yield f"**{plain(annotations['summary'])}** ({when})\n"
        for paragraph in annotations["runbook"].splitlines():
            label, _, text = plain(paragraph).partition(": ")
            yield f"{filled(f'**{label}.** {text}')}\n"
        yield f"```promql\n{filled(rule['expr'])}\n```\n"


def filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def plain(template: str) -> str:
    """Replace the labels of a template by their names, and its figures by N."""
    named = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda label: label[1].upper(), template)
    return re.sub(r"\{\{ \$value[^}]*\}\}", "N", named.replace("| humanizePercentage }}", "}} %"))


if __name__ == "__main__":
    sys.exit(main())
