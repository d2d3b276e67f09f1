"""Engine processes with faults armed in them, without Ray: what each reported, and how it ended."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TypeVar

from workers.fault_injection.fault import Fault
from workers.launch.processes import Died, LaunchedProcesses
from workers.launch.ranks import LaunchedJob, assignment
from workers.protocol.orders import Generation
from workers.protocol.reports import FaultReport, Outcome, Report
from workers.rank import Rank
from workers.state.layer_state import state_digest

Kind = TypeVar("Kind")


@dataclass
class Drilled:
    """The outcome of a job with faults."""

    reports: list[tuple[int, Report]] = field(default_factory=list)
    """(rank, report), in order of arrival."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    """For each rank, the error that it raised, or `died`."""

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [report for _, report in self.reports if isinstance(report, kind)]

    @property
    def fired(self) -> list[tuple[int, str, int, str]]:
        """(rank, fault, step, phase) of every reported fault."""
        return [(r.rank, r.fault, r.step, r.phase) for r in self.of(FaultReport)]

    @property
    def state_sha256(self) -> str:
        layers = {layer: text for o in self.outcomes.values() for layer, text in o.layer_digests}
        return state_digest([layers[layer] for layer in sorted(layers)])


def drill(job: LaunchedJob, faults: dict[int, tuple[Fault, ...]]) -> Drilled:
    """Run `job` with `faults` armed on its ranks before the first step."""
    done = Drilled()
    with LaunchedProcesses(job.plan.world_size, _train, (job, faults)) as ranks:
        for number, message in ranks.receive():
            match message:
                case ("port", port):
                    ranks.tell(port)
                case Outcome():
                    done.outcomes[number] = message
                    ranks.done(number)
                case ("error", text):
                    done.errors[number] = text
                    ranks.done(number)
                case Died():
                    done.errors[number] = "died"
                    ranks.done(number)
                case report:
                    done.reports.append((number, report))
    return done


def _train(argument: tuple[LaunchedJob, dict[int, tuple[Fault, ...]]], number: int, pipe: Connection) -> None:
    job, faults = argument
    turn = threading.Lock()

    def send(message: object) -> None:
        # Faults report from the thread in which they fire.
        with turn:
            pipe.send(message)

    rank = Rank(job.config, number, send)
    for fault in faults.get(number, ()):
        rank.faults.arm(fault)
    try:
        rank.setup()
        rank.follow(assignment(job, number))
        if number == 0:
            send(("port", rank.host_store()))
        members = tuple(range(job.plan.world_size))
        rank.join(
            Generation(
                number=1,
                epoch=1,
                members=members,
                store_host="127.0.0.1",
                store_port=pipe.recv(),
                timeout_s=60,
            )
        )
        outcome = rank.train()
        send(outcome)
    except Exception as error:
        send(("error", f"{type(error).__name__}: {error}"))
    pipe.recv()
    rank.close()
