from __future__ import annotations

import io
import math
from collections.abc import Callable

import pytest
from rich.console import Console

from orchestrator.cli.text.progress import BarProgress, LineProgress, open_progress
from orchestrator.quantities import operations, percent, rate, seconds, significant, size
from planner.wording import counted
from workers.protocol.reports import (
    CheckpointReport,
    FreezeReport,
    FrozenAction,
    StepReport,
    ValidationReport,
)


def a_step(step: int, **changes: object) -> StepReport:
    fields = {
        "generation": 1,
        "step": step,
        "loss": 2.34567,
        "grad_norm": 0.8123,
        "lr": 1e-3,
        "samples": 32,
        "tokens": 4096,
        "step_s": 0.16,
        "bubble": 0.2727,
        "skipped": False,
    }
    return StepReport(**{**fields, **changes})  # pyright: ignore


def saved(step: int, error: str | None = None) -> CheckpointReport:
    return CheckpointReport(step=step, path=f"runs/a/step-{step}", bytes=1_240_000, seconds=0.5, error=error)


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=60, force_terminal=False)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=True, _environ={"TERM": "xterm-256color"})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_log_line_has_every_field_and_is_never_wrapped() -> None:
    console = plain_console()
    with LineProgress(console, 20) as progress:
        progress.show(a_step(1))
    assert written(console) == (
        "step  1/20  loss 2.3457  grad norm 0.812  25.6k tokens/s  step time 160 ms  bubble 27.3 %"
        "  about 3.04 s left\n"
    )


def test_a_log_shows_the_first_step_one_per_interval_and_the_last() -> None:
    console, clock = plain_console(), Clock()
    with LineProgress(console, 10, every_s=2.0, clock=clock) as progress:
        for step in range(1, 11):
            progress.show(a_step(step))
            clock.now_s += 0.75
    assert [line.split()[1] for line in written(console).splitlines()] == ["1/10", "4/10", "7/10", "10/10"]


def test_a_log_says_what_time_is_left_at_the_pace_of_the_newest_steps_and_not_at_the_end() -> None:
    console = plain_console()
    with LineProgress(console, 4, every_s=0.0) as progress:
        for step, step_s in enumerate((9.0, 0.2, 0.4, 0.3), 1):
            progress.show(a_step(step, step_s=step_s))
    assert [line.rpartition("%  ")[2] for line in written(console).splitlines()[:3]] == [
        "about 27.0 s left",
        "about 400 ms left",
        "about 300 ms left",
    ]
    assert written(console).endswith("bubble 27.3 %\n")


def test_a_log_that_ends_early_still_shows_its_last_step() -> None:
    console, clock = plain_console(), Clock()
    with LineProgress(console, 100, clock=clock) as progress:
        for step in range(1, 8):
            progress.show(a_step(step))
    assert [line.split()[1] for line in written(console).splitlines()] == ["1/100", "7/100"]


def test_validations_and_checkpoints_bring_the_figures_of_their_step_along() -> None:
    console, clock = plain_console(), Clock()
    with LineProgress(console, 100, clock=clock) as progress:
        for step in range(1, 6):
            progress.show(a_step(step))
        progress.show(ValidationReport(step=5, loss=2.5))
        progress.show(saved(5))
        progress.show(saved(5, error="no space left on device"))
        progress.note("rank 2 is slow", warning=True)
    assert written(console).splitlines()[1:] == [
        "step   5/100  loss 2.3457  grad norm 0.812  25.6k tokens/s  step time 160 ms  bubble 27.3 %"
        "  about 15.2 s left",
        "step   5/100  validation loss 2.5000",
        "checkpoint of step 5 saved: 1.24 MB in 500 ms, runs/a/step-5",
        "checkpoint of step 5 FAILED, the ones before it stay: no space left on device",
        "warning: rank 2 is slow",
    ]


@pytest.mark.parametrize(("norm", "words"), [(math.inf, "inf"), (math.nan, "not a number")])
def test_a_skipped_step_is_said_plainly_even_between_two_lines(norm: float, words: str) -> None:
    console, clock = plain_console(), Clock()
    with LineProgress(console, 100, clock=clock) as progress:
        progress.show(a_step(1))
        progress.show(a_step(2, grad_norm=norm, skipped=True))
    assert written(console).splitlines()[-1] == (
        f"step 2 skipped: its gradient norm is {words}, so no weight was changed"
    )


def test_text_that_looks_like_markup_is_printed_as_it_is() -> None:
    console = plain_console()
    LineProgress(console, 1).note("path [bold]/tmp[/bold] [1]")
    assert written(console) == "path [bold]/tmp[/bold] [1]\n"


def test_samples_are_counted_where_there_are_no_tokens() -> None:
    console = plain_console()
    LineProgress(console, 1).show(a_step(1, tokens=0))
    assert "200 samples/s" in written(console)


def test_a_terminal_gets_a_bar_with_the_figures_under_it() -> None:
    console = terminal()
    with BarProgress(console, "tiny", 10) as progress:
        for step in range(1, 11):
            progress.show(a_step(step, loss=5.0 - 0.25 * step))
        progress.show(saved(10))
        progress.show(ValidationReport(step=10, loss=2.625))
    text = written(console)
    for words in (
        "tiny",
        "10/10",
        "loss 2.5000",
        "grad norm 0.812",
        "25.6k tokens/s",
        "step time 160 ms",
        "bubble 27.3 %",
        "validation loss 2.6250",
        "checkpoint 10",
    ):
        assert words in text, words


def test_failures_and_skipped_steps_scroll_above_the_bar() -> None:
    console = terminal()
    with BarProgress(console, "tiny", 10) as progress:
        progress.show(a_step(3, grad_norm=math.inf, skipped=True))
        progress.show(saved(3, error="disk [full]"))
    text = written(console)
    assert "warning: step 3 skipped: its gradient norm is inf" in text
    assert "warning: checkpoint of step 3 FAILED, the ones before it stay: disk [full]" in text


def test_a_resumed_bar_starts_where_the_job_does() -> None:
    console = terminal()
    with BarProgress(console, "tiny", 10, first_step=8):
        pass
    assert "7/10" in written(console).replace(" ", "")


def test_the_console_decides_on_the_display() -> None:
    assert isinstance(open_progress(plain_console(), "tiny", 5), LineProgress)
    assert isinstance(open_progress(terminal(), "tiny", 5), BarProgress)


def test_quantities() -> None:
    assert [significant(x) for x in (0, 0.8123, 12.44, 312.4, 3120.4, 0.0001234, 5e6, math.nan)] == [
        "0",
        "0.812",
        "12.4",
        "312",
        "3,120",
        "0.000123",
        "5e+06",
        "not finite",
    ]
    assert [rate(x) for x in (0, 845, 999.7, 12_345, 1_204_000)] == ["0", "845", "1.00k", "12.3k", "1.20M"]
    assert [seconds(x) for x in (42e-6, 0.183, 0.9997, 1.834, 59.97, 125, 3725)] == [
        "42 µs",
        "183 ms",
        "1.00 s",
        "1.83 s",
        "1 min 00 s",
        "2 min 05 s",
        "1 h 02 min",
    ]
    assert [size(x) for x in (512, 1_240_000, 999_990)] == ["512 B", "1.24 MB", "1.00 MB"]
    assert percent(0.1818) == "18.2 %"
    assert [counted(1, "rank"), counted(4000, "batch", "batches")] == ["1 rank", "4,000 batches"]


FREEZE = {"method": "timelyfreeze", "warm_up": 2, "monitoring": 6, "ramp": 8}


def froze(step: int, *shares: float) -> FreezeReport:
    actions = tuple(
        FrozenAction(stage=0, microbatch=index, planned=share, actual=share, parameters=share)
        for index, share in enumerate(shares)
    )
    return FreezeReport(step=step, rank=0, actions=actions)


def test_a_line_says_the_phase_and_what_is_frozen() -> None:
    console, clock = plain_console(), Clock()
    with LineProgress(console, 10, every_s=0.0, clock=clock) as progress:
        progress.expect_freezing(FREEZE)
        for step in (1, 4, 6, 7, 10):
            if step > 4:
                progress.show(froze(step, 0.25, 0.75))
                progress.show(froze(step, 0.8))
            progress.show(a_step(step))
    assert [line.split("  bubble 27.3 %  ")[1].split("  ") for line in written(console).splitlines()] == [
        ["phase warm-up", "about 1.44 s left"],
        ["phase monitoring, nothing frozen", "about 960 ms left"],
        ["phase monitoring, all frozen", "frozen 60.0 %", "about 640 ms left"],
        ["phase ramp", "frozen 60.0 %", "about 480 ms left"],
        ["phase stable", "frozen 60.0 %"],
    ]


def test_a_job_that_never_freezes_has_no_phase() -> None:
    console = plain_console()
    with LineProgress(console, 10) as progress:
        progress.expect_freezing({"method": "none"})
        progress.show(froze(1, 0.5))
        progress.show(a_step(1))
    assert "phase" not in written(console)
    assert "frozen" not in written(console)


def test_the_bar_says_the_phase_too() -> None:
    console = terminal()
    with BarProgress(console, "a", 10) as progress:
        progress.expect_freezing(FREEZE)
        progress.show(froze(7, 0.5))
        progress.show(a_step(7))
    assert "phase ramp  frozen 50.0 %" in written(console)


@pytest.mark.parametrize("console", [plain_console, terminal])
def test_the_steps_of_a_job_that_says_epochs_become_known_later(console: Callable[[], Console]) -> None:
    shown = console()
    with open_progress(shown, "gpt", 100) as progress:
        progress.expect_steps(7)
        progress.show(a_step(7))
    assert "7/7" in written(shown)


def test_numbers_of_operations() -> None:
    assert [operations(count) for count in (12, 12_345, 1.2345e12, 9.996e14, 3.2e18)] == [
        "12 FLOP",
        "12.3 kFLOP",
        "1.23 TFLOP",
        "1.00 PFLOP",
        "3.20 EFLOP",
    ]
