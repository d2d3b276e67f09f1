"""The commands of a job's clients: each is logged, carried out once for its id, and answered. Runs on the event loop.

The commands are declared in `orchestrator/commands/`; here are their effects. What changes where layers are is in
`reshaping.py`, what changes freezing in `freeze_control.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.commands.apply import Apply
from orchestrator.commands.cancel import Cancel
from orchestrator.commands.checkpoint import Checkpoint
from orchestrator.commands.command import JobCommand
from orchestrator.commands.drain import Drain
from orchestrator.commands.entry import CommandEntry
from orchestrator.commands.fault import InjectFault
from orchestrator.commands.freeze import Freeze
from orchestrator.commands.move import Move
from orchestrator.commands.pause import Pause
from orchestrator.commands.resume import Resume
from orchestrator.commands.scale import Scale
from orchestrator.commands.table import BY_LOG_NAME, parsed
from orchestrator.commands.undrain import Undrain
from orchestrator.controller.event_loop import EventLoop
from orchestrator.controller.freeze.freeze_control import FreezeControl
from orchestrator.controller.inject_faults import inject
from orchestrator.controller.requests.resize_request import choose_drained
from orchestrator.controller.reshaping import Reshaping
from orchestrator.events import types as events
from orchestrator.history.command_table import KEPT
from orchestrator.history.job_view import JobView
from orchestrator.history.recap import recap
from orchestrator.lifecycle.states import (
    JobPaused,
    JobPlacing,
    Live,
    Saving,
    Stopping,
    in_words,
)
from orchestrator.lifecycle.stimuli import Aborted, PauseAsked, ResumeAsked, SaveOrStop, Stimulus
from workers.config import ElasticConfig
from workers.protocol.errors import JobError
from workers.protocol.orders import Request


@dataclass(eq=False, repr=False)
class Commands:
    """The commands of one job while its controller lives."""

    _job: str
    """Its name."""
    _elastic: ElasticConfig
    _loop: EventLoop
    _reshaping: Reshaping
    _freezing: FreezeControl
    _view: Callable[[], JobView]
    """Returns the job's view, with everything that is logged."""
    _log: Callable[[events.Event], None]
    """Logs an event, with the answers that it gives."""

    async def accept(self, command: events.Commanded) -> str:
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
            text = await self._do(parsed(command))
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
        if BY_LOG_NAME[name].at_once:
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
            self._reshaping.check_base(parsed(entry.command))
            raise JobError(entry.answer.text)
        return entry.answer.text

    async def _do(self, command: JobCommand) -> str:
        match command:
            case Move() | Apply() | Scale() | Drain():
                return await self._reshaping.carry_out(command)
            case Cancel(abort=abort):
                text = (
                    "ends at once, without a checkpoint"
                    if abort
                    else "stops after the step in flight, with a checkpoint"
                )
            case Checkpoint():
                state = self._loop.state
                if isinstance(state, JobPaused):
                    raise JobError(f"the job is paused, and a checkpoint has its step {state.step} already")
                if not isinstance(state, Live) or not state.job.progress.trained:
                    raise JobError(
                        f"the job is {in_words(state)} and has nothing to save: ask again once it trains"
                    )
                text = "writes a checkpoint after the step in flight"
            case Pause():
                state = self._loop.state
                if not isinstance(state, Live | JobPlacing) or isinstance(
                    state, Stopping | JobPaused | Saving
                ):
                    raise JobError(f"the job is {in_words(state)}: there is nothing to pause")
                text = "pauses after the step in flight, with a checkpoint, and gives its ranks back"
            case Resume():
                state = self._loop.state
                if not isinstance(state, JobPaused):
                    raise JobError(f"the job is {in_words(state)}: only a paused job resumes")
                text = f"goes on from the checkpoint of step {state.step} as soon as there is room"
            case Undrain(node=node):
                notice = choose_drained(node, self._view().ranks)
                undrained = events.Undrained(node=notice.node, host=notice.host, id=command.key)
                self._log(undrained)
                return undrained.sentence
            case Freeze():
                return await self._freezing.change(command)
            case InjectFault(drill=drill):
                allowed = self._elastic.allow_faults
                return await inject(self._job, allowed, self._view().step, {**drill})
            case _:
                raise AssertionError(f"{command.name} has no effect")
        self._loop.post(stimulus_of(command))
        return text

    def go_on(self) -> None:
        """Repeat the commands that the previous controller may not have carried out, if repeating is safe; refuse the
        others."""
        for entry in self._view().commands.pending():
            self._go_on_with(entry)

    def _go_on_with(self, entry: CommandEntry) -> None:
        name = entry.command.name
        if name in BY_LOG_NAME and BY_LOG_NAME[name].repeatable:
            self._loop.post(stimulus_of(parsed(entry.command)))
        elif not self._reshaping.again(entry.command, recap(self._view())) and not self._freezing.again(
            entry
        ):
            text = (
                f"the controller was killed before it knew what came of the {name}: see the job's events, then ask"
                " again with another id"
            )
            self._answer(entry.command.id, done=False, text=text)

    def _answer(self, id: str, *, done: bool, text: str) -> None:
        self._log(events.Answered(id=id, done=done, step=self._view().step, text=text))


def stimulus_of(command: JobCommand) -> Stimulus:
    """Stimulus that a command gives the lifecycle, which alone carries it out."""
    match command:
        case Cancel(abort=abort):
            return Aborted() if abort else SaveOrStop(Request.STOP)
        case Checkpoint():
            return SaveOrStop(Request.CHECKPOINT)
        case Pause():
            return PauseAsked()
        case Resume():
            return ResumeAsked()
        case _:
            raise AssertionError(f"the lifecycle carries out no {command.name}")
