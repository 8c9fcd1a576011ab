"""Send a simulated gateway's jobs and commands to workers, and return the answers, over the simulated network."""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.errors import TandemError
from tandem.core.request import Job
from tandem.core.worker_load import WorkerLoad
from tandem.engine.effects import Effect
from tandem.engine.engine import Engine
from tandem.orchestration.commands import CancelJob, ReleaseLease
from tandem.sim.cluster.network import Network
from tandem.sim.cluster.worker import SimWorker
from tandem.sim.kernel.event_queue import Actor


class Calls:
    """Calls of one gateway, whose actor is `party`. Messages that the network loses are not repeated."""

    def __init__(self, network: Network, party: Actor) -> None:
        self._network = network
        self._party = party

    def submit(self, worker: SimWorker, job: Job, answered: Callable[[TandemError | None, WorkerLoad], None]) -> None:
        """Submit a job; `answered` is called with the refusal, or None, and the worker's load."""

        def answer(refusal: TandemError | None, load: WorkerLoad) -> None:
            self._network.send(f"answer {job.key}", lambda: answered(refusal, load), worker.party, self._party)

        def arrive() -> None:
            worker.submit(job, answer)

        self._network.send(f"submit {type(job).__name__} {job.key}", arrive, self._party, worker.party)

    def send_command(self, command: CancelJob | ReleaseLease) -> None:
        """Send a command that has no answer."""

        def cancel(engine: Engine, now: float) -> list[Effect]:
            assert isinstance(command, CancelJob)
            return [effect for key in command.keys for effect in engine.cancel(key, now)]

        if isinstance(command, CancelJob):
            label = f"cancel {', '.join(map(str, command.keys))}"
            self._network.post(command.worker, label, cancel, self._party)
        else:
            key = command.key
            self._network.post(command.worker, f"release {key}", lambda e, now: e.revoke_lease(key, now), self._party)
