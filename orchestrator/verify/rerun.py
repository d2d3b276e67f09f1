"""Steps of a run computed again, from its checkpoints and its initial weights, and compared with its log bit for bit.

One rank of this machine computes whole steps, without Ray: the bits do not depend on how the model was cut, nor on what
happened to its ranks. Freeze decisions are taken from the log. Writes into a folder of its own.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from orchestrator.events import types as events
from orchestrator.spec.job_spec import Spec
from orchestrator.verify.ledger import Ledger
from planner.freezing import FreezePlan
from planner.plan import Plan
from planner.schedule.expand import schedule_of
from planner.wording import counted
from workers.config import AdaptConfig, CheckpointConfig, ElasticConfig, WorkerConfig
from workers.protocol.errors import JobError
from workers.protocol.orders import CheckpointRef
from workers.protocol.reports import FreezeStarted, StepReport

COMPARED = ("loss", "grad_norm", "lr", "samples", "tokens", "skipped", "samples_digest")
"""Fields of a step's report that must be equal, to the last digit."""
LAST_DIGITS = 0.01
"""Another machine may give numbers that differ by this share at most; what differs by more was changed."""


@dataclass(frozen=True, kw_only=True)
class RerunStretch:
    """Consecutive steps that one state leads to."""

    start: CheckpointRef | None
    """The checkpoint that has it; None: the initial weights."""
    last: int
    """The last step before the next state, or before the settings change."""

    @property
    def begun(self) -> int:
        """Steps committed at its start."""
        return 0 if self.start is None else self.start.step

    @property
    def steps(self) -> int:
        return self.last - self.begun


def choose(lengths: Sequence[int], steps: int) -> tuple[int, ...]:
    """Number of steps of each stretch, from its first on, to compute again: at most `steps` together, shared out
    evenly, the remainder to the newest.

    Args:
        lengths: steps of each stretch, oldest first.
    """
    chosen = [0] * len(lengths)
    while (left := min(steps, sum(lengths)) - sum(chosen)) > 0:
        roomy = [i for i in reversed(range(len(lengths))) if chosen[i] < lengths[i]]
        share = max(1, left // len(roomy))
        for i in roomy[: left // share]:
            chosen[i] = min(lengths[i], chosen[i] + share)
    return tuple(chosen)


def audit_by_rerun(
    records: Sequence[events.Record],
    ledger: Ledger,
    location: str,
    steps: int,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Compute up to `steps` of the steps in `ledger` again and add what that shows. Imports torch.

    Args:
        location: the run's folder.
        say: receives what is being computed, in words.
    """
    run = _Run(records, ledger, location)
    if (why := run.unfit()) is not None:
        ledger.unproved.append(f"that its steps compute what the log says: {why}")
        return
    found = run.stretches()
    chosen = choose([stretch.steps for stretch in found], steps)
    done: list[str] = []
    computed = proved = 0
    for stretch, count in zip(found, chosen, strict=True):
        if not count:
            continue
        text = _named(stretch, count)
        say(f"computing again: {text}")
        try:
            ending = run.compare(stretch, count)
        except (JobError, OSError, RuntimeError, ValidationError) as error:
            reason = str(error).partition("\n")[0].removeprefix("rank 0: ")
            ledger.unproved.append(f"{text}: they cannot be computed again: {reason}")
            continue
        computed += count
        if ending is not None:
            proved += count
            done.append(text + ending)
    if done:
        ledger.facts.append(f"computed again: {'; '.join(done)}")
        ledger.claims.append(f"{counted(proved, 'step')} computed again with the same losses, norms and bits")
    if computed < ledger.steps:
        ledger.assumed.append(
            f"the other {ledger.steps - computed} of {counted(ledger.steps, 'step')} compute what the log says: they"
            " were not computed again"
        )


def _named(stretch: RerunStretch, count: int) -> str:
    first = stretch.begun + 1
    which = f"step {first}" if count == 1 else f"steps {first} to {first + count - 1}"
    return f"{which} from the {'initial weights' if stretch.start is None else f'checkpoint of step {stretch.begun}'}"


class _Run:
    """A run whose steps are computed again."""

    def __init__(self, records: Sequence[events.Record], ledger: Ledger, location: str) -> None:
        self._ledger = ledger
        self._location = location
        self._specs: dict[int, Mapping[str, Any]] = {}
        """Generation -> the spec that it trained with."""
        self._plan: Plan | None = None
        self._machines: set[str] = set()
        self._other_bits: list[str] = []
        """Reasons why the run left the one trajectory, in words."""
        freezing: dict[int, FreezePlan] = {}
        spec: Mapping[str, Any] = {}
        for event in (record.event for record in records):
            match event:
                case events.Submitted():
                    spec = event.spec
                case events.Formed(generation=generation):
                    self._specs[generation.number] = spec
                case events.Issued(plan=plan):
                    self._plan = self._plan or plan
                case events.RankStarted(machine=machine):
                    self._machines.add(machine)
                case FreezeStarted(plan=plan) if plan.start is not None:
                    freezing[plan.start] = plan
                case events.Migrated(mode="deferred", step=step):
                    self._other_bits.append(f"the deferred move at step {step}")
        if spec.get("elastic", {}).get("salvage", "none") != "none":
            self._other_bits.append("elastic.salvage")
        self._freezing = tuple(freezing[start] for start in sorted(freezing))

    def unfit(self) -> str | None:
        """Why none of its steps can be computed again here; None if they can."""
        import torch

        if self._plan is None or not self._ledger.steps:
            return "the log has no plan or no step"
        device = self._ledger.spec.get("cluster", {}).get("device")
        if device == "cuda" and not torch.cuda.is_available():
            return "GPUs computed them, and this machine has none"
        return None

    def stretches(self) -> tuple[RerunStretch, ...]:
        """Its steps by the state that leads to them, oldest first."""
        from workers.checkpoint.folder import checkpoints

        states: dict[int, CheckpointRef | None] = {0: None}
        for ref in reversed(checkpoints(self._location)):
            if ref.step <= self._ledger.steps:
                states[ref.step] = ref
        begins = sorted(states)
        found = [
            RerunStretch(start=states[begin], last=self._alike(begin, last))
            for begin, last in zip(begins, [*begins[1:], self._ledger.steps], strict=True)
        ]
        return tuple(stretch for stretch in found if stretch.steps)

    def _alike(self, begin: int, last: int) -> int:
        """The last step up to `last` that is in the log and has the settings of the step after `begin`."""
        settings = None
        for step in range(begin + 1, last + 1):
            report = self._ledger.standing[step - 1]
            if report is None or report.generation not in self._specs:
                return step - 1
            spec = {**self._specs[report.generation], "checkpoint": None, "elastic": None, "cluster": None}
            spec |= {"pipeline": None, "adapt": None, "logging": None}
            if settings is None:
                settings = spec
            if spec != settings:
                return step - 1
        return last

    def compare(self, stretch: RerunStretch, count: int) -> str | None:
        """Compute the first `count` steps of `stretch` again and compare them; return in words which state they ended
        in, if that was compared. None: something differs, and the ledger says what.

        Raises:
            JobError: the model or the data is not there.
            RuntimeError: the rank failed.
        """
        from workers.checkpoint.folder import checkpoints, read_manifest
        from workers.launch.ranks import LaunchedJob, run_processes

        assert self._plan is not None
        last = stretch.begun + count
        with tempfile.TemporaryDirectory(prefix="freshet-rerun-") as output:
            config = self._config(self._report_of(stretch.begun + 1).generation, output)
            plan = _on_one_rank(self._plan)
            run = run_processes(
                LaunchedJob(
                    config=config,
                    plan=plan,
                    schedule=schedule_of(plan),
                    start=stretch.start,
                    stop_at=last if last < config.job.steps else None,
                    freeze_plans=self._freezing,
                )
            )
            made = {report.step: report for report in run.reports if isinstance(report, StepReport)}
            files = read_manifest(checkpoints(output)[0]).files
        differing = [
            text
            for step in range(stretch.begun + 1, last + 1)
            if (text := self._difference(step, made[step]))
        ]
        ending, differs = self._ending(
            last, {name: each.sha256 for name, each in files.items()}, run.state_sha256
        )
        differing += [differs] if differs else []
        if not differing:
            return ending
        more = f"; {len(differing) - 1} more differences up to step {last}" if len(differing) > 1 else ""
        text = f"{differing[0]}, from the {_named(stretch, count).partition(' from the ')[2]}{more}"
        steps = range(stretch.begun + 1, last + 1)
        close = all(_close(self._report_of(step), made[step]) for step in steps)
        if (why := self._excuse()) is None or not close:
            self._ledger.wrong.append(text)
        else:
            self._ledger.unproved.append(f"{text}, which {why} may have caused")
        return None

    def _report_of(self, step: int) -> StepReport:
        report = self._ledger.standing[step - 1]
        assert report is not None, "a stretch has only steps that are in the log"
        return report

    def _config(self, generation: int, output: str) -> WorkerConfig:
        config = Spec.model_validate(self._specs[generation]).for_ranks
        data, kept = (
            config.data,
            {"validate_every": 0, "timeline_every": 0, "curvature_every": 0, "sample_tokens": 0},
        )
        device = "cuda" if config.device == "cuda" else "cpu"
        if data.cache is None and "://" not in self._location:
            data = data.model_copy(update={"cache": f"{self._location}/data"})
        return config.model_copy(
            update={
                "job": config.job.model_copy(update={**kept, "output": output}),
                "cluster": config.cluster.model_copy(update={"device": device, "pin_cores": False}),
                "data": data,
                "checkpoint": CheckpointConfig(),
                "adapt": AdaptConfig(),
                "elastic": ElasticConfig(redundancy="none"),
            }
        )

    def _difference(self, step: int, made: StepReport) -> str | None:
        """Differences between the log and the rerun in `step`, in words."""
        logged = self._report_of(step)
        found = [
            f"{name} {getattr(logged, name)!r} is logged and {getattr(made, name)!r} is computed again"
            for name in COMPARED
            if not _same(getattr(logged, name), getattr(made, name)) and getattr(logged, name) != ""
        ]
        return f"step {step}: {', '.join(found)}" if found else None

    def _ending(self, last: int, files: Mapping[str, str], sha256: str) -> tuple[str, str | None]:
        """Compare the state after `last` with the run's checkpoint of it and with the run's end, where there is one.
        Return what was compared, and what differs, both in words."""
        from workers.checkpoint.folder import DamagedCheckpointError, checkpoints, read_manifest

        compared: list[str] = []
        ref = next((ref for ref in checkpoints(self._location) if ref.step == last), None)
        if ref is not None:
            try:
                theirs = {name: each.sha256 for name, each in read_manifest(ref).files.items()}
            except DamagedCheckpointError:  # the audit of checkpoints says so
                theirs = files
            compared.append(f"to the checkpoint of step {last}")
            if odd := sorted(name for name in files if theirs.get(name) != files[name]):
                return (
                    "",
                    f"the state after step {last}: {odd[0]} in the checkpoint is not what is computed again",
                )
        end = self._ledger.end
        if isinstance(end, events.Finished) and end.step == last and end.state_sha256 is not None:
            compared.append("to the end")
            if end.state_sha256 != sha256:
                return (
                    "",
                    f"the end: state_sha256 {end.state_sha256} is logged and {sha256} is computed again",
                )
        return "".join(f", {text}" for text in compared), None

    def _excuse(self) -> str | None:
        """Possible causes of other bits though the log is as it was written; None: nothing."""
        from workers.devices.machine import arithmetic

        reasons = list(self._other_bits)
        here = arithmetic(str(self._ledger.spec["cluster"]["device"]))
        if others := sorted(machine or "an unknown machine" for machine in self._machines if machine != here):
            reasons.append(f"another machine ({others[0]} in the log, {here} here)")
        return " or ".join(reasons) or None


def _on_one_rank(plan: Plan) -> Plan:
    """`plan`'s arithmetic on one rank."""
    layers = plan.layers[-1][1]
    return replace(
        plan,
        layers=((0, layers),),
        stage_ranks=(0,),
        schedule="1f1b",
        chunks=1,
        pipelines=1,
        shares=(),
        standbys=(),
        snapshots=(),
        snapshot_every=0,
        shard="gradients" if plan.shard == "gradients" else "none",
    )


def _close(logged: StepReport, made: StepReport) -> bool:
    """Whether both are of the same step, up to the last digits of what it computed."""
    return (logged.samples, logged.tokens, logged.skipped) == (
        made.samples,
        made.tokens,
        made.skipped,
    ) and all(
        _same(left, right) or math.isclose(left, right, rel_tol=LAST_DIGITS)
        for left, right in ((logged.loss, made.loss), (logged.grad_norm, made.grad_norm))
    )


def _same(left: Any, right: Any) -> bool:
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))
