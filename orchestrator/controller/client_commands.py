"""The commands of a job's clients: each is logged, carried out once for its id, and answered. Runs on the event loop.

What changes where layers are is in `reshaping.py`, what changes freezing in `freeze_control.py`. Which events of the
job answer a command is in `orchestrator/history/command_table.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.controller import reshaping
from orchestrator.controller.event_loop import EventLoop
from orchestrator.controller.freeze.freeze_control import FreezeControl
from orchestrator.controller.inject_faults import inject
from orchestrator.controller.requests.resize_request import choose_drained
from orchestrator.controller.reshaping import Reshaping
from orchestrator.events import types as events
from orchestrator.history.command_table import KEPT, Entry
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.states import Live, Paused, Placing, Saving, Stopping
from orchestrator.lifecycle.stimuli import Aborted, Asked, PauseAsked, ResumeAsked
from workers.config import ElasticConfig
from workers.protocol import JobError, Request


class Commands:
    """The commands of one job while its controller lives.

    Args:
        job: its name.
        view: returns the job's view, with everything that is logged.
        log: logs an event, with the answers that it gives.
    """

    def __init__(
        self,
        job: str,
        elastic: ElasticConfig,
        loop: EventLoop,
        reshaping: Reshaping,
        freezing: FreezeControl,
        *,
        view: Callable[[], JobView],
        log: Callable[[events.Event], None],
    ) -> None:
        self._job = job
        self._elastic = elastic
        self._loop = loop
        self._reshaping = reshaping
        self._freezing = freezing
        self._view = view
        self._log = log

    async def take(self, command: events.Commanded) -> str:
        """Carry out `command`, once for each id; return in words what will happen.

        Raises:
            CommandIdReused: another command had this id.
            PlanChanged: it is for an older plan than the newest one.
            JobError: the command is refused; says why.
        """
        id, name = command.id, command.name
        if self._view().commands.find(id, name, command.arguments) is not None:
            return self._reply(id) or f"{name} was asked for already"
        # The log may have the job's end long before the controller is done: what it passes on takes time.
        if self._view().outcome is not None:
            raise JobError(f"job {self._job!r} has ended: it takes no commands")
        if (waiting := len(self._view().commands.pending())) >= KEPT:
            raise JobError(f"{waiting} commands wait for their outcome already: ask again once some have one")
        self._log(command)
        try:
            text = await self._do(command)
        except Exception as error:
            if decided := self._reply(id):  # meanwhile, such as by the job's end
                return decided
            if isinstance(error, JobError):
                self._answer(id, done=False, text=str(error))
                raise
            # Trouble of the cluster or a bug of ours: an outcome all the same.
            text = f"the {name} failed: {type(error).__name__}: {error}"
            self._answer(id, done=False, text=text)
            raise JobError(text) from error
        if name == "fault":
            self._answer(id, done=True, text=text)
        return self._reply(id) or text

    def _reply(self, id: str) -> str:
        """Return what the command `id` came to, in words; empty if that is not known yet.

        Raises:
            PlanChanged: it was refused, and is for an older plan than the newest one.
            JobError: it was refused; says why.
        """
        entry = self._view().commands.get(id)
        if entry is None or entry.answer is None:
            return ""
        if not entry.answer.done:
            self._reshaping.check_base(entry.command)
            raise JobError(entry.answer.text)
        return entry.answer.text

    async def _do(self, command: events.Commanded) -> str:
        name, arguments = command.name, command.arguments
        if name in reshaping.NAMES:
            return await self._reshaping.carry_out(command)
        match name, arguments:
            case "stop", {}:
                self._loop.post(Asked(Request.STOP))
                return "stops after the step in flight, with a checkpoint"
            case "abort", {}:
                self._loop.post(Aborted())
                return "ends at once, without a checkpoint"
            case "checkpoint", {}:
                state = self._loop.state
                if isinstance(state, Paused):
                    raise JobError(f"the job is paused, and a checkpoint has its step {state.step} already")
                if not isinstance(state, Live) or not state.job.progress.trained:
                    raise JobError(
                        f"the job is {type(state).__name__.lower()} and has nothing to save: ask again once it trains"
                    )
                self._loop.post(Asked(Request.CHECKPOINT))
                return "writes a checkpoint after the step in flight"
            case "pause", {}:
                state = self._loop.state
                if not isinstance(state, Live | Placing) or isinstance(state, Stopping | Paused | Saving):
                    raise JobError(f"the job is {type(state).__name__.lower()}: there is nothing to pause")
                self._loop.post(PauseAsked())
                return "pauses after the step in flight, with a checkpoint, and gives its ranks back"
            case "resume", {}:
                state = self._loop.state
                if not isinstance(state, Paused):
                    raise JobError(f"the job is {type(state).__name__.lower()}: only a paused job resumes")
                self._loop.post(ResumeAsked())
                return f"goes on from the checkpoint of step {state.step} as soon as there is room"
            case "undrain", {"node": str(node)}:
                notice = choose_drained(node, self._view().ranks)
                undrained = events.Undrained(node=notice.node, host=notice.host, id=command.id)
                self._log(undrained)
                return undrained.sentence
            case "freeze", _:
                return await self._freezing.change(command)
            case "fault", {"drill": dict(drill)}:
                return await self._fault(drill)
        raise JobError(f"no such command: {name} {arguments}")

    def go_on(self) -> None:
        """Repeat the commands that the previous controller may not have carried out, if repeating is safe; refuse the
        others."""
        for entry in self._view().commands.pending():
            self._go_on_with(entry)

    def _go_on_with(self, entry: Entry) -> None:
        match entry.command.name:
            case "checkpoint":
                self._loop.post(Asked(Request.CHECKPOINT))
            case "stop":
                self._loop.post(Asked(Request.STOP))
            case "abort":
                self._loop.post(Aborted())
            case "pause":
                self._loop.post(PauseAsked())
            case "resume":
                self._loop.post(ResumeAsked())
            case _ if self._reshaping.again(entry.command, self._view().recap()):
                pass
            case _ if self._freezing.again(entry):
                pass
            case name:
                self._answer(
                    entry.command.id,
                    done=False,
                    text=f"the controller was killed before it knew what came of the {name}: see the job's events, then"
                    " ask again with another id",
                )

    def _answer(self, id: str, *, done: bool, text: str) -> None:
        self._log(events.Answered(id=id, done=done, step=self._view().step, text=text))

    async def _fault(self, drill: dict[str, Any]) -> str:
        """Run a drill on the job; return in words what will happen.

        Args:
            drill: a `workers.fault_injection.drill.Drill`, as JSON values.

        Raises:
            JobError: the job allows no faults, or there is no such rank or node.
        """
        return await inject(self._job, self._elastic.allow_faults, self._view().step, drill)
