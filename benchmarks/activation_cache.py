"""Kept activations of frozen layers on one rank: a hit beside computing, and where the two break even.

    python -m benchmarks.activation_cache [--blocks N] [--width N] [--frozen N] [--rounds N]

A GPT whose epoch is four steps. Runs with and without `freeze.cache`, in turns: the median step of the epochs after the
first, and the forward pass of a microbatch in them. The break-even that the job's own trial names, in blocks, is its
time to read over its time to compute, per block; it is compared with the same from reads and forward passes that are
timed here by themselves.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median

import torch

from benchmarks.one_rank import one_rank_job
from benchmarks.parts.configs import changed
from benchmarks.parts.targets import at_least, at_most
from planner.ir import Action, ActionKind
from workers.activation_cache.cache_folders import CacheFolders
from workers.activation_cache.row_form import RowForm, rows_of
from workers.activation_cache.slot_files import MARK_BYTES, SlotFiles
from workers.config import DataConfig, FreezeConfig
from workers.launch.ranks import LaunchedJob, run_processes
from workers.models.registry import build_definition
from workers.protocol.reports import ActivationsKept, ActivationsUsed, StepReport, TimelineReport

EPOCH_STEPS, EPOCHS = 4, 4
FASTER, APART = 2.0, 0.2


@dataclass(frozen=True)
class Round:
    step_s: float
    forward_s: float
    """Of a microbatch."""
    kept: ActivationsKept | None
    bytes: int
    state: str | None


def job(folder: Path, given: argparse.Namespace, cache: str, bound_bytes: int) -> LaunchedJob:
    made = one_rank_job(EPOCH_STEPS * EPOCHS, folder / cache, given.blocks, given.width, "float32", gpu=False)
    config, text = made.config, folder / "text.txt"
    samples = EPOCH_STEPS * config.microbatches * config.pipeline.microbatch_size
    lines = "".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(10**5))
    text.write_text(lines[: (samples + 1) * config.model.context + 1])
    freeze = FreezeConfig(method="prefix", prefix=given.frozen + 1, cache=cache, cache_bytes=bound_bytes)
    data = DataConfig(source="text", path=str(text), validation_fraction=0.0)
    return replace(made, config=changed(config, freeze=freeze, data=data))


def run(made: LaunchedJob) -> Round:
    ran = run_processes(made)
    steps = {r.step: r.step_s for r in ran.reports if isinstance(r, StepReport)}
    forwards = [
        span.end_s - span.start_s
        for r in ran.reports
        if isinstance(r, TimelineReport) and r.step > 2 * EPOCH_STEPS
        for span in r.spans
        if Action.parse(span.action).kind is ActionKind.FORWARD
    ]
    kept = [r for r in ran.reports if isinstance(r, ActivationsKept)]
    used = [r.bytes for r in ran.reports if isinstance(r, ActivationsUsed)]
    return Round(
        step_s=median(taken for step, taken in steps.items() if step > 2 * EPOCH_STEPS),
        forward_s=median(forwards),
        kept=kept[0] if kept else None,
        bytes=max(used, default=0),
        state=ran.state_sha256,
    )


def break_even(made: LaunchedJob, folder: Path) -> float:
    """Blocks that compute a microbatch in the time that it takes to read one."""
    torch.set_num_threads(1)
    config = made.config
    rows, width, context = config.pipeline.microbatch_size, config.model.width, config.model.context
    block = build_definition(config.model, 512).layers[1].build()
    batch = torch.randn(rows, context, width)
    folders = CacheFolders(str(folder), None)
    slots = SlotFiles(folders.open(print), print)
    marks = [bytes([row]) * MARK_BYTES for row in range(rows)]
    for row, (data, mark) in enumerate(zip(rows_of([batch]), marks, strict=True)):
        slots.write(row, data, mark)
    read_s, computed_s = list[float](), list[float]()
    form = RowForm.of([batch])
    for _ in range(60):
        begun_s = time.perf_counter()
        found = form.empty(rows)
        for row, (into, mark) in enumerate(zip(rows_of(found), marks, strict=True)):
            assert slots.read(row, into, mark)
        read_s.append(time.perf_counter() - begun_s)
        begun_s = time.perf_counter()
        with torch.no_grad():
            block(*found)
        computed_s.append(time.perf_counter() - begun_s)
    slots.close()
    folders.close()
    folders.remove()
    return median(read_s) / median(computed_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--frozen", type=int, default=6, help="blocks")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    bound = 200 * 10**6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rounds = {"off": list[Round](), "auto": list[Round]()}
        for number in range(given.rounds):
            for cache, done in rounds.items():
                (folder / str(number)).mkdir(exist_ok=True)
                done.append(run(job(folder / str(number), given, cache, bound)))
        measured = break_even(job(folder, given, "auto", bound), folder / "alone")
    off, on = rounds["off"], rounds["auto"]
    assert len({each.state for each in (*off, *on)}) == 1, "the bits differ"
    print(
        f"{given.frozen} of {given.blocks} blocks frozen, width {given.width}; {os.cpu_count()} cores, load"
        f" {os.getloadavg()[0]:.1f}; {date.today()}; the same bits"
    )
    step_off, step_on = (median(each.step_s for each in done) for done in (off, on))
    forward_off, forward_on = (median(each.forward_s for each in done) for done in (off, on))
    print(
        f"step {1e3 * step_off:.0f} ms without, {1e3 * step_on:.0f} ms with: {step_off / step_on:.2f} times as fast"
    )
    print(
        f"forward pass of a microbatch {1e3 * forward_off:.1f} ms without, {1e3 * forward_on:.1f} ms with:"
        f" {forward_off / forward_on:.2f} times as fast"
    )
    told = [each.kept for each in on if each.kept is not None]
    read_s, computed_s = median(one.read_s for one in told), median(one.computed_s for one in told)
    text = f"a hit: read {1e3 * read_s:.2f} ms, computed {1e3 * computed_s:.1f} ms: {computed_s / read_s:.1f} times"
    print(at_least(text, computed_s / read_s, FASTER))
    named = read_s / (computed_s / given.frozen)
    apart = abs(named / measured - 1)
    text = f"break-even named {named:.3f} blocks, measured {measured:.3f}: {apart:.1%} apart"
    print(at_most(text, apart, APART))
    taken = max(each.bytes for each in on)
    print(at_most(f"{taken / 1e6:.1f} MB kept", taken / 1e6, bound / 1e6))


if __name__ == "__main__":
    main()
