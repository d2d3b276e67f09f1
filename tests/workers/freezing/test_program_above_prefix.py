"""A freeze program's ratios above layers that are frozen as a whole: the bits of a plain loop, on any partition."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from reference import train_plainly
from test_engine_bits import losses
from test_prefix_training import SHAPES, prefixes
from torch import nn

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from planner.freezing import REFERENCE_AT, FreezeOverrides, FreezePlan, Phases
from workers.checkpoint.folder import checkpoints
from workers.config import FreezeConfig
from workers.freezing.prefix.paper import PaperRule
from workers.freezing.prefix.rule import CommitSeen
from workers.protocol.frozen_prefix import FrozenPrefix
from workers.protocol.reports import FreezeReport

STEPS = 12
GROWS, THAWS, FOLLOWED = 8, 10, 6
SCHEDULE = ((2, 3), (GROWS, 5), (THAWS, 1))
BY_HAND = FreezeConfig(
    method="timelyfreeze+prefix", schedule=SCHEDULE, warm_up=1, monitoring=5, ramp=5, r_max="auto"
)
RATIOS = (*[(0.0,) * 4] * 3, (1.0, 0.0, 0.0, 1.0), (0.0,) * 4, (0.0, 1.0, 0.0, 0.0), (1.0,) * 4, (0.0,) * 4)
"""Whole ones: what is drawn is known."""
PLAN = FreezePlan(epoch=1, version=1, ratios=RATIOS, start=FOLLOWED)


def below(step: int) -> int:
    begun = [layers for first, layers in SCHEDULE if first <= step]
    return begun[-1] if begun else 0


def frozen(step: int, microbatch: int, name: str, module: nn.Module) -> Collection[str]:
    layer = int(name.removeprefix("l"))
    everything = layer < below(step) or step in (4, 5)
    planned = step >= FOLLOWED and step != REFERENCE_AT and RATIOS[layer][microbatch % 4] == 1.0
    return [key for key, _ in module.named_parameters()] if everything or planned else ()


@pytest.mark.each_choice
@pytest.mark.parametrize("trait", ["plain", "dropout", "batchnorm", "attention"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_are_those_of_a_plain_loop_that_throws_both_kinds_of_gradients_away(
    tmp_path: Path, trait: str, shape: dict[str, Any]
) -> None:
    config = small_config(tmp_path, trait, steps=STEPS, freeze=BY_HAND)
    expected, expected_losses = train_plainly(config, tmp_path, frozen=frozen)
    run = run_threads(job(config, freeze_plans=(PLAN,), **shape))
    assert run.state_sha256 == expected
    assert losses(run) == expected_losses
    assert prefixes(run) == list(SCHEDULE)
    told = {report.step for report in run.reports if isinstance(report, FreezeReport)}
    assert told == set(range(2, STEPS + 1)), "what a prefix freezes counts from its first step on"


def test_a_rule_goes_on_when_a_request_adds_a_program_to_it(tmp_path: Path) -> None:
    """The prefix that PipeTransformer's rule has come to stays, and grows at later checks."""
    alone = FreezeConfig(method="pipetransformer", warm_up=1, check_every=2, alpha=0.5)
    both = FreezeOverrides(
        method="timelyfreeze+pipetransformer", r_max=0.5, phases=Phases(warm_up=0, monitoring=8, ramp=8)
    )
    asked = FreezePlan(epoch=1, version=1, ratios=((0.0,) * 4,) * 8, control=both, start=5)
    config = small_config(tmp_path, steps=9, freeze=alone)
    runs = [run_threads(job(config, freeze_plans=(asked,), **shape)) for shape in SHAPES[:2]]
    found, same = map(prefixes, runs)
    assert found == same
    assert found[0][0] <= 5 < found[-1][0]
    assert [layers for _, layers in found] == sorted({layers for _, layers in found})
    assert runs[0].state_sha256 == runs[1].state_sha256


def test_the_rule_goes_by_gradients_as_if_the_program_left_none_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that the program leaves out has not become quiet."""
    seen = dict[int, tuple[float, ...]]()
    quiet = PaperRule.quiet

    def noting(rule: PaperRule, prefix: FrozenPrefix, commit: CommitSeen, frozen: int) -> int:
        seen[commit.step] = tuple(commit.norms)
        return quiet(rule, prefix, commit, frozen)

    monkeypatch.setattr(PaperRule, "quiet", noting)
    method = FreezeConfig(
        method="timelyfreeze+pipetransformer",
        warm_up=1,
        monitoring=5,
        ramp=5,
        check_every=2,
        alpha=0.1,
        r_max=0.8,
    )
    runs = list[tuple[str, list[tuple[int, int]], dict[int, tuple[float, ...]]]]()
    for shape in SHAPES[:3]:
        config = small_config(tmp_path, steps=10, freeze=method)
        run = run_threads(job(config, freeze_plans=(PLAN,), **shape))
        runs.append((run.state_sha256, prefixes(run), dict(seen)))
        assert sorted(seen) == [3, 5, 7, 9]
        assert all(norm > 0.0 for step in (5, 7, 9) for norm in seen[step]), (
            "5 freezes everything, 7 and 9 layer 6"
        )
        seen.clear()
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("stop_at", [3, 7, 9])
def test_stop_and_resume(tmp_path: Path, stop_at: int) -> None:
    config = small_config(tmp_path / "quiet", steps=STEPS, freeze=BY_HAND)
    expected = run_threads(job(config, freeze_plans=(PLAN,), ranks=2, schedule="1f1b"))
    again = changed(config, output=str(tmp_path / "stopped"))
    run_threads(job(again, freeze_plans=(PLAN,), stop_at=stop_at, **SHAPES[1]))
    (newest,) = checkpoints(again.job.folder)
    resumed = run_threads(job(again, freeze_plans=(PLAN,), start=newest, generation=2, **SHAPES[3]))
    assert resumed.state_sha256 == expected.state_sha256
