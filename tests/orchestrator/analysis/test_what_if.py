"""Steps with other ranks, schedules, cuts, ratios, devices and links, from a profile with round times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_profile import made_profile
from synthetic_run import freezing_records, plan, records

from orchestrator.analysis.what_if import WhatIf, what_if
from orchestrator.commands.change import KEEP, WhatIfChange
from orchestrator.events.types import Event, Issued, Record
from orchestrator.history.job_view import fold
from orchestrator.report.step.what_if_part import what_if_part, words
from planner.freezing import FreezeOverrides, FreezePlan
from workers.protocol.errors import JobError
from workers.protocol.reports import FreezeStarted, PrefixFrozen

NAMES = [f"layer{number}" for number in range(10)]
PROFILE = made_profile(NAMES, [1000] * 10, 4)
VIEW = fold(records())


def asked(**change: object) -> WhatIf:
    return what_if(VIEW, PROFILE, WhatIfChange(**change))  # type: ignore[arg-type]


def test_today_is_the_job_s_plan_and_nothing_changed_is_the_same_step() -> None:
    found = asked(cut=KEEP)
    assert found.now.cut == found.then.cut == (3, 2, 2, 3)
    assert found.now.prediction.step_s == found.then.prediction.step_s
    # Rank 0 and 3 have three layers of 10 + 20 ms, and eight microbatches: no step is shorter than that.
    assert found.now.prediction.step_s > 8 * 3 * 0.03
    assert words(found).endswith("as long")


def test_a_slower_device_makes_the_step_longer_and_another_cut_takes_layers_from_it() -> None:
    kept = asked(cut=KEEP, slow_rank=0, slowdown=2.0)
    assert kept.then.prediction.step_s > 1.5 * kept.now.prediction.step_s
    best = asked(slow_rank=0, slowdown=2.0)
    assert best.then.cut[0] < 3
    assert best.now.prediction.step_s < best.then.prediction.step_s < kept.then.prediction.step_s
    assert best.same_shape


def test_another_cut_has_copies_of_its_own() -> None:
    """Today's copies are of today's layers: under another cut a rank would keep a copy of a layer that it owns."""
    spread = tuple(
        ((place + 1) % 4,) for place, (first, stop) in enumerate(plan().layers) for _ in range(first, stop)
    )
    view = fold(Record(time_s=0.0, event=change(record.event, spread)) for record in records())
    view.spec["elastic"] = {"redundancy": "peer"}
    found = what_if(view, PROFILE, WhatIfChange(cut=(5, 2, 2, 1)))
    for case in (found.now, found.then):
        assert len(case.plan.standbys) == 10
        for layer, copies in enumerate(case.plan.standbys):
            owner = case.plan.stage_ranks[case.plan.stage_of_layer(layer)]
            assert copies
            assert owner not in copies
    assert what_if(view, PROFILE, WhatIfChange(ranks=2)).then.plan.standbys != ()
    view.spec["elastic"] = {"redundancy": "peer", "copy_every": 4}
    kept = what_if(view, PROFILE, WhatIfChange(cut=(5, 2, 2, 1))).then.plan
    assert (kept.standbys, kept.snapshots, kept.snapshot_every) == ((), found.then.plan.standbys, 4)
    view.spec["elastic"] = {"redundancy": "checkpoint"}
    assert what_if(view, PROFILE, WhatIfChange(cut=(5, 2, 2, 1))).then.plan.standbys == ()


def change(event: Event, standbys: tuple[tuple[int, ...], ...]) -> Event:
    """`event`, with copies of the layers if it issues a plan."""
    return replace(event, plan=replace(event.plan, standbys=standbys)) if isinstance(event, Issued) else event


def test_a_thin_link_makes_the_step_longer() -> None:
    found = asked(cut=KEEP, source=0, target=1, bandwidth=1e-6)
    assert found.then.prediction.step_s > found.now.prediction.step_s


def test_fewer_ranks_and_another_schedule_are_other_shapes() -> None:
    fewer = asked(ranks=2)
    assert (fewer.then.plan.pipeline_ranks, sum(fewer.then.cut), fewer.same_shape) == (2, 10, False)
    assert fewer.then.prediction.step_s > fewer.now.prediction.step_s
    other = asked(schedule="zb-h1")
    assert (other.then.plan.schedule, other.same_shape) == ("zb-h1", False)
    assert other.then.prediction.bubble < other.now.prediction.bubble
    assert asked(ranks=6).then.plan.pipeline_ranks == 6  # more than were measured


def test_freezing_shortens_the_step_as_the_freeze_program_says() -> None:
    found = asked(cut=KEEP, r_max=0.5)
    assert found.then.prediction.step_s < found.then.unfrozen_s == found.now.prediction.step_s
    assert max(ratio for _, _, ratio in found.then.ratios) <= 1
    assert found.then.r_max == 0.5


def test_today_has_the_freeze_settings_that_a_request_gave_the_job() -> None:
    view = fold(freezing_records())
    assert what_if(view, PROFILE, WhatIfChange(cut=KEEP)).now.r_max == 0.8
    for start, method, r_max in ((150, "timelyfreeze", 0.25), (160, "none", 0.0), (170, "apf", 0.0)):
        plan = FreezePlan(
            epoch=1, version=start, ratios=(), control=FreezeOverrides(method=method, r_max=0.25), start=start
        )
        # Steps that the ranks have committed: the plan is in force.
        view.fold(Record(time_s=view.last_s, event=FreezeStarted(plan=plan)))
        found = what_if(view, PROFILE, WhatIfChange(cut=KEEP))
        assert found.now.r_max == found.then.r_max == r_max
        assert (found.now.prediction.step_s < found.now.unfrozen_s) == (r_max > 0)


def test_layers_frozen_as_a_whole_have_their_forward_passes_alone() -> None:
    """Also where the job has frozen others meanwhile; then fewer make the step longer again."""
    steps = [asked(cut=KEEP, frozen=layers).then.prediction.step_s for layers in (0, 3, 5, 9)]
    assert steps[0] == asked(cut=KEEP).now.prediction.step_s
    # The last rank has three layers of 10 + 20 ms, which bound the step until two of them are frozen.
    assert steps[0] > steps[1] > steps[2] > 8 * 3 * 0.03 > steps[3] > 8 * 3 * 0.01
    view = fold(records())
    view.fold(Record(time_s=view.last_s, event=frozen(5)))
    found = what_if(view, PROFILE, WhatIfChange(cut=KEEP, frozen=3))
    assert (found.now.whole, found.then.whole) == (5, 3)
    assert [each.prediction.step_s for each in (found.now, found.then)] == [steps[2], steps[1]]
    stays = what_if(view, PROFILE, WhatIfChange(cut=KEEP))
    assert (stays.then.whole, stays.then.prediction.step_s) == (5, steps[2])


def frozen(layers: int) -> PrefixFrozen:
    return PrefixFrozen(step=2, layers=layers, bound=0.0, norms=(), names=())


def test_the_page_shows_both_cases_beside_each_other() -> None:
    part = what_if_part(asked(ranks=2, r_max=0.5))
    table = {str(row[0]): row[1:] for row in part.numbers.rows}
    assert table["Ranks of a pipeline"] == ("4", "2")
    assert table["r_max"] == ("no ratios", "0.5")
    assert table["Layers frozen as a whole"] == ("0", "0")
    assert [step.name for step in part.timelines.steps] == ["today", "changed"]
    assert (len(part.now_memory), len(part.then_memory)) == (4, 2)
    assert all(rank.fits and rank.peak_bytes > 0 for rank in part.then_memory)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ranks": 3, "cut": KEEP}, "today's cut is for today's ranks and schedule"),
        ({"slow_rank": 9}, "there is no rank 9: the profile has the ranks 0 to 3"),
        ({"cut": (5, 5)}, "stages"),
        ({"schedule": "interleave"}, "did you mean 'interleaved'"),
        ({"schedule": "interleaved", "ranks": 3}, "needs a multiple of the ranks"),
        ({"ranks": 11}, "11 stages, and the model has 10 layers"),
    ],
)
def test_what_cannot_be_is_said_with_the_way_out(change: dict[str, object], said: str) -> None:
    with pytest.raises(JobError, match=said):
        asked(**change)


def test_without_a_profile_nothing_is_simulated() -> None:
    with pytest.raises(JobError, match="no profile in its folder"):
        what_if(VIEW, None, WhatIfChange())
