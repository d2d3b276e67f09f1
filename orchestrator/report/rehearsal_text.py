"""A rehearsal's numbers as lines of text. Knows no terminal."""

from __future__ import annotations

from orchestrator.analysis.effective_time import EffectiveTime
from orchestrator.analysis.node_time import PARTS, NodeUse
from orchestrator.quantities import percent, seconds, significant
from planner.wording import counted

USES = {
    NodeUse.TRAINED: "in committed steps",
    NodeUse.STALLED: "in committed steps, longer than usual: a rank stood still",
    NodeUse.IN_FLIGHT: "in steps that a failure cut off",
    NodeUse.RECOVERING: "recovering",
    NodeUse.UNDONE: "in steps undone by a return to a checkpoint",
    NodeUse.JOINING: "joining: live, not yet training",
    NodeUse.PAUSED: "paused for capacity",
    NodeUse.LEAVING: "leaving: noticed, and no longer training",
    NodeUse.IDLE: "idle: the plan does not use them",
}
"""The uses of a live node's time, in words."""


def _copies(number: int) -> str:
    return counted(number, "copy", "copies") if number else "no copy"


def lines(found: EffectiveTime) -> list[str]:
    """The report of `freshet rehearse`."""
    tag = ", emulated devices" if found.emulated else ""
    text = [
        f"effective training time ratio {found.ratio:.3f} at {found.speedup:.3g} times the trace's speed{tag};"
        f" at speed 1 it would be {found.ratio_at_speed_1:.3f}",
        f"{seconds(found.seconds)}: {counted(found.losses, 'node')} lost,"
        f" {counted(found.joins, 'node')} joined; {counted(found.steps, 'step')} committed, median"
        f" {seconds(found.step_s)}; {counted(found.rerun, 'step')} in flight run again,"
        f" {counted(found.steps_lost, 'committed step')} lost",
        f"{found.live:,.1f} live node-seconds:",
    ]
    text += [
        f"  {spent:10,.1f}  {percent(spent / found.live):>7}  {USES[use]}"
        for use, spent in found.node_seconds.items()
        if spent > 0
    ]
    if found.losses:
        text.append(f"each failed node cost {significant(found.lost_per_loss)} node-seconds")
    if found.joins:
        text.append(f"each node that joined cost {significant(found.lost_per_join)} node-seconds")
    if found.copies:
        text.append(
            f"with up-to-date copies of every layer, the {counted(found.copies[0].losses, 'loss', 'losses')} of the"
            " whole trace would cost:"
        )
    text += [
        f"  {_copies(saved.copies):>10}  {counted(saved.steps_lost, 'committed step'):>20}: {saved.last_holders}"
        " of them take the last node that holds some layer"
        for saved in found.copies
    ]
    if found.recovery_s:
        text.append(f"{'recovery':22}{'p50':>9}{'p95':>9}{'max':>9}")
    for name in (*PARTS, "total", "commit"):
        spread = found.recovery_s.get(name)
        if spread is not None:
            label = "death to next commit" if name == "commit" else name
            text.append(
                f"  {label:20}{seconds(spread.p50):>9}{seconds(spread.p95):>9}{seconds(spread.max):>9}"
            )
    return text
