"""Events in words, as log lines and pages show them. Pure."""

from __future__ import annotations

from orchestrator.events.types import (
    Adapted,
    FreezeSolved,
    LinksTimed,
    MemoryLimited,
    Noticed,
    SpeedsChanged,
)
from orchestrator.quantities import seconds
from planner.simulation.slow_links import SlowLink
from planner.wording import link_rate
from workers.protocol import FaultReport


def noticed_text(notice: Noticed) -> str:
    """A notice in words."""
    numbers = ", ".join(str(rank) for rank in notice.ranks)
    where = f" on {notice.host}" if notice.host else ""
    match len(notice.ranks):
        case 0:
            who = "a rank that is already gone"
        case 1:
            who = f"rank {numbers}{where}"
        case _:
            who = f"ranks {numbers}{where}"
    left = f", {seconds(notice.left_s)} left" if notice.left_s is not None else ""
    return f"{who} must leave ({notice.source}{left})"


def injected_text(report: FaultReport) -> str:
    """An injected fault in words: which, on which rank, where."""
    place = f" in phase {report.phase} of step {report.step}" if report.phase else ""
    if report.file:
        return f"injected fault: {report.fault} changes a bit of {report.file}, by rank {report.rank}{place}"
    return f"injected fault: {report.fault} on rank {report.rank}{place}"


def speeds_text(changed: SpeedsChanged) -> str:
    """Which ranks became slower or faster, in words."""
    if changed.changes:
        return "; ".join(changed.changes)
    slowest_rank, slowest = max(changed.slowdowns, key=lambda entry: entry[1])
    return (
        f"speeds are known: rank {slowest_rank}, the slowest, takes {slowest:.2f} times the profile's times"
    )


def some_slower(changed: SpeedsChanged) -> bool:
    """Whether a rank became slower: others that became faster are no reason to warn."""
    return any(" slower " in change for change in changed.changes)


def links_text(timed: LinksTimed) -> str:
    """Which links became slower or faster, in words."""
    if timed.changes:
        return "; ".join(timed.changes)
    if not timed.links:
        return "no link is slower than before the job any more"
    slow = [f"rank {link.source} -> {link.target} {link_text(link)}" for link in timed.links]
    return f"slow links: {'; '.join(slow)}"


def link_text(link: SlowLink) -> str:
    """What a link carries, in words."""
    return f"{link_rate(link.bytes_per_s)}, {seconds(link.latency_s)}"


def adapted_text(adapted: Adapted) -> str:
    """What was decided on the ranks' speeds, in words."""
    return f"{verdict(adapted)}: {adapted.reason}"


def verdict(adapted: Adapted) -> str:
    """Whether the plan changes for the ranks' speeds: layers move, or pipelines get other shares."""
    return "the plan changes" if adapted.moves else "the cut stays"


def limited_text(limited: MemoryLimited) -> str:
    """What later plans take of a rank's memory, in words."""
    if limited.limit_bytes is None:
        return (
            f"rank {limited.rank} ran out of memory, and all layers recompute from now on: {limited.reason}"
        )
    return f"plans take {limited.limit_bytes:,} bytes of rank {limited.rank} at most from now on: {limited.reason}"


def solved_text(solved: FreezeSolved) -> str:
    """What a solution of the freeze program is expected to bring, in words."""
    times = f"{seconds(solved.unfrozen_s)} -> {seconds(solved.solved_s)}"
    by = ", by the profile's times" if solved.measured_unfrozen_s is None else ""
    return f"expected compute per step: {times} ({seconds(solved.all_frozen_s)} with everything frozen){by}"
