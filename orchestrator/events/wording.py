"""Events in words, as log lines and pages show them. Pure."""

from __future__ import annotations

from datetime import datetime

from orchestrator.events.types import (
    Adapted,
    FreezeSolved,
    LinksTimed,
    MemoryLimited,
    Migrated,
    Noticed,
    OutOfMemory,
    Paused,
    ProfileDoubted,
    SpeedsChanged,
    Stalled,
)
from orchestrator.quantities import seconds, size
from planner.simulation.slow_links import SlowLink
from planner.wording import counted, link_rate, named, shares_text
from workers.protocol import CopiedAhead, FaultReport, LayersChecked, MemoryLow, Rescued


def command_words(name: str) -> str:
    """A command or request as the command line and the pages call it: a job is cancelled, with a checkpoint or now."""
    return {"stop": "cancel", "abort": "cancel now"}.get(name, name)


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


def doubted_text(doubt: ProfileDoubted) -> str:
    """The step times that contradict a profile, and what happens to it, in words."""
    text = (
        f"the profile does not hold: steps take {seconds(doubt.took_s)},"
        f" and {seconds(doubt.predicted_s)} were predicted"
    )
    if doubt.disturbed:
        text += f"; while it was measured, {doubt.disturbed}"
    if doubt.again:
        return f"{text}. The next start of the job measures again"
    return f"{text}. It was measured just before, and nothing is known that disturbed it"


def undrained_text(node: str, host: str) -> str:
    """The end of a drain in words."""
    return f"the job may start ranks on node {node[:12]}{f' ({host})' if host else ''} again"


def injected_text(report: FaultReport) -> str:
    """An injected fault in words: which, on which rank, where."""
    place = f" in phase {report.phase} of step {report.step}" if report.phase else ""
    if report.file:
        return f"injected fault: {report.fault} changes a bit of {report.file}, by rank {report.rank}{place}"
    return f"injected fault: {report.fault} on rank {report.rank}{place}"


def speeds_text(changed: SpeedsChanged) -> str:
    """Ranks that became slower or faster, in words."""
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
    """Links that became slower or faster, in words."""
    if timed.changes:
        return "; ".join(timed.changes)
    if not timed.links:
        return "no link is slower than before the job any more"
    slow = [f"rank {link.source} -> {link.target} {link_text(link)}" for link in timed.links]
    return f"slow links: {'; '.join(slow)}"


def link_text(link: SlowLink) -> str:
    """Rate and latency of a link, in words."""
    return f"{link_rate(link.bytes_per_s)}, {seconds(link.latency_s)}"


def adapted_text(adapted: Adapted) -> str:
    """The decision on the ranks' speeds, in words."""
    return f"{verdict(adapted)}: {adapted.reason}"


def verdict(adapted: Adapted) -> str:
    """Whether the plan changes for the ranks' speeds: layers move, or pipelines get other shares."""
    return "the plan changes" if adapted.moves else "the cut stays"


def limited_text(limited: MemoryLimited) -> str:
    """The memory limit of later plans for a rank, in words."""
    if limited.limit_bytes is None:
        return (
            f"rank {limited.rank} ran out of memory, and all layers recompute from now on: {limited.reason}"
        )
    return f"plans take {limited.limit_bytes:,} bytes of rank {limited.rank} at most from now on: {limited.reason}"


def short_text(short: OutOfMemory) -> str:
    """A rank that ran out of memory, in words."""
    lack, epoch_version = short.shortage, f"{short.plan[0]}.{short.plan[1]}"
    known = [
        f"{size(count_bytes)} {what}"
        for count_bytes, what in (
            (lack.needed_bytes, "asked for"),
            (lack.free_bytes, "free"),
            (lack.held_bytes, "held by its tensors"),
        )
        if count_bytes is not None
    ]
    numbers = f" ({', '.join(known)})" if known else ""
    return (
        f"rank {short.rank} ran out of memory{numbers} under plan {epoch_version}, after step {short.step}: the step"
        " is run again under a smaller plan"
    )


def low_text(low: MemoryLow) -> str:
    """Low memory on a rank's device, in words."""
    return (
        f"the device of rank {low.rank} has {size(low.left_bytes)} left beside what step {low.step} takes of it, less"
        f" than the reserve of {size(low.reserve_bytes)}"
    )


def checked_text(checked: LayersChecked) -> str:
    """The layers that a rank compared with plain autograd, in words."""
    text = (
        f"rank {checked.rank} compared {counted(len(checked.layers), 'layer')} with plain autograd in"
        f" {seconds(checked.seconds)}: the same numbers"
    )
    left = "; ".join(f"{name} is left to it, as {why}" for name, why in checked.whole.items())
    return f"{text}; {left}" if left else text


def rescued_text(rescued: Rescued) -> str:
    """The ranks' reaction to the loss of the cluster's head, and what follows, in words; times are local ones."""
    lost, ends = (
        datetime.fromtimestamp(moment).strftime("%H:%M:%S") for moment in (rescued.lost_s, rescued.ends_s)
    )
    wrote = (
        f"wrote a checkpoint of step {rescued.step} in {seconds(rescued.seconds)}"
        if rescued.error is None
        else f"could not write a checkpoint of step {rescued.step}: {rescued.error}"
    )
    return (
        f"the cluster's head has not answered since {lost}. Unless it comes back, Ray ends the job's processes about"
        f" {ends}. The ranks {wrote}, and train on; --resume goes on from their newest checkpoint"
    )


def moved_text(moved: Migrated) -> str:
    """A move of layers or shares during training, and its cost, in words."""
    if not moved.layers:
        return f"a step now has {shares_text(moved.shares)} ({moved.mode}): {seconds(moved.stall_s)} of standing still"
    has = "has" if len(moved.layers) == 1 else "have"
    return (
        f"{named('layer', moved.layers)} {has} moved ({moved.mode}): {seconds(moved.seconds)} and"
        f" {counted(moved.steps, 'step')} on the way, {seconds(moved.stall_s)} of standing still"
    )


def stalled_text(stalled: Stalled) -> str:
    """A rank's standstill, its length and its reason, in words."""
    did = f"computed {stalled.action}" if stalled.action else "answered nothing"
    why = f" ({stalled.reason})" if stalled.reason else ""
    return f"rank {stalled.rank} {did} for {seconds(stalled.seconds)} and goes on{why}"


def paused_text(paused: Paused) -> str:
    """Why the job waits, in words."""
    if paused.requested:
        return f"paused after step {paused.step}: a checkpoint has it, and the ranks are given back"
    return f"waiting for capacity: {paused.reason}"


def copied_text(copied: CopiedAhead) -> str:
    """Layers that a rank without a place has copied ahead, in words."""
    if copied.error is not None:
        return f"rank {copied.rank} copies no layers ahead: {copied.error}"
    return (
        f"rank {copied.rank} has copies of {named('layer', copied.layers)} as of step {copied.step}:"
        f" {size(copied.bytes)} in {seconds(copied.seconds)}"
    )


def solved_text(solved: FreezeSolved) -> str:
    """The expected gain of a solution of the freeze program, in words."""
    times = f"{seconds(solved.unfrozen_s)} -> {seconds(solved.solved_s)}"
    by = ", by the profile's times" if solved.measured_unfrozen_s is None else ""
    return f"expected compute per step: {times} ({seconds(solved.all_frozen_s)} with everything frozen){by}"
