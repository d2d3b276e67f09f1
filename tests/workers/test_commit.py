"""The commit's decision, computed from records alone."""

import math
import subprocess
import sys
from functools import reduce
from operator import add

import pytest

from planner.codec import from_json, to_json
from workers.commit.commit import CommitError, CommitRecord, decide
from workers.protocol.orders import Request


def record(rank: int, **fields: object) -> CommitRecord:
    return CommitRecord(rank=rank, generation=1, step=4, **fields)


def test_the_decision_is_the_mean_loss_and_the_norm_of_the_mean_gradient() -> None:
    records = [
        record(0, squared_norms={0: 9.0, 1: 16.0}, busy_s=1.0),
        record(1, squared_norms={2: 11.0}, losses={0: 1.0, 1: 2.0, 2: 6.0}, busy_s=2.0),
    ]
    decision = decide(records, microbatches=3, layers=3, clip_norm=None, lr=0.1)
    assert decision.loss == 3.0
    assert decision.grad_norm == 6.0 / 3
    assert decision.scale == 1 / 3
    assert decision.busy_s == 1.5
    assert not decision.skipped


def test_microbatches_count_by_their_shares_of_targets() -> None:
    records = [
        record(0, squared_norms={0: 9.0, 1: 16.0}),
        record(1, squared_norms={2: 11.0}, losses={0: 1.0, 1: 2.0, 2: 6.0}, shares={0: 0.5, 1: 0.25, 2: 0.0}),
    ]
    decision = decide(records, microbatches=3, layers=3, clip_norm=None, lr=0.1)
    assert decision.loss == (0.5 + 0.5) / 0.75
    assert decision.grad_norm == 6.0 / 0.75
    assert decision.scale == 1 / 0.75
    assert decision.shares == 0.75
    assert not decision.skipped


def test_a_step_without_a_target_is_skipped() -> None:
    records = [record(0, squared_norms={0: 0.0}, losses={0: 0.0}, shares={0: 0.0})]
    decision = decide(records, microbatches=1, layers=1, clip_norm=1.0, lr=0.1)
    assert (decision.skipped, decision.loss, decision.grad_norm) == (True, 0.0, 0.0)
    assert not decision.targets, "and so no loss scale is lowered"


def test_norms_of_shards_add_up_as_those_of_whole_layers_do() -> None:
    norms = {0: {"a": 0.1, "b": 0.2, "c": 0.3}, 1: {"a": 1e16, "w": 1.0, "z": 1.0}}
    of_layers = {layer: (named.pop("a") + 0.0, named) for layer, named in norms.items()}
    # Not `sum`, which makes up for what additions round off from Python 3.12 on.
    whole = {layer: reduce(add, named.values(), first) for layer, (first, named) in of_layers.items()}
    records = [
        record(0, parameter_norms={0: {"b": 0.2}, 1: {"z": 1.0, "a": 1e16}}, losses={0: 1.0}),
        record(1, parameter_norms={0: {"a": 0.1, "c": 0.3}, 1: {"w": 1.0}}),
    ]
    arrived = [from_json(CommitRecord, to_json(each)) for each in records]
    expected = decide(
        [record(0, squared_norms=whole, losses={0: 1.0})], microbatches=1, layers=2, clip_norm=None, lr=0.1
    )
    assert decide(arrived, microbatches=1, layers=2, clip_norm=None, lr=0.1, shards=2) == expected
    del arrived[1].parameter_norms[1]
    with pytest.raises(CommitError, match="gradient norms of 1 of 2 shards of layer 1"):
        decide(arrived, microbatches=1, layers=2, clip_norm=None, lr=0.1, shards=2)


def test_clipping_scales_to_the_norm_and_never_up() -> None:
    records = [record(0, squared_norms={0: 100.0}, losses={0: 1.0})]
    assert decide(records, microbatches=1, layers=1, clip_norm=2.5, lr=0.1).scale == 0.25
    assert decide(records, microbatches=1, layers=1, clip_norm=40.0, lr=0.1).scale == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_skips_the_step(bad: float) -> None:
    records = [record(0, squared_norms={0: 1.0}), record(1, squared_norms={1: bad}, losses={0: 1.0})]
    decision = decide(records, microbatches=1, layers=2, clip_norm=1.0, lr=0.1)
    assert decision.skipped


def test_requests_of_one_rank_bind_all() -> None:
    records = [
        record(0, squared_norms={0: 1.0}, losses={0: 0.5}),
        record(1, requests=(Request.STOP, Request.CHECKPOINT)),
    ]
    decision = decide(records, microbatches=1, layers=1, clip_norm=None, lr=0.1)
    assert decision.requests == {Request.STOP, Request.CHECKPOINT}


def test_a_record_survives_the_wire_bit_for_bit() -> None:
    sent = record(
        3,
        losses={7: 0.1 + 0.2, 2: math.inf},
        squared_norms={0: 1e-310, 5: 2 / 3},
        busy_s=0.25,
        requests=(Request.STOP,),
        files={"run/step-1": {"a.safetensors": [12, "ff"]}},
        files_errors={"run/step-2": "No space left on device"},
    )
    assert from_json(CommitRecord, to_json(sent)) == sent


def test_ranks_at_different_steps_are_a_bug_that_is_named() -> None:
    records = [record(0), CommitRecord(rank=1, generation=1, step=5)]
    with pytest.raises(CommitError, match=r"\[1\] came to another commit"):
        decide(records, microbatches=1, layers=1, clip_norm=None, lr=0.1)


OF_ANOTHER_STEP = """
from workers.commit.commit import CommitError, CommitRecord, decide
records = [CommitRecord(rank=rank, generation=1, step=rank) for rank in range(2)]
try:
    decide(records, microbatches=0, layers=0, clip_norm=None, lr=0.1)
except CommitError as error:
    print(error)
"""


def test_records_of_several_commits_are_refused_in_optimized_python_too() -> None:
    run = subprocess.run(
        [sys.executable, "-O", "-c", OF_ANOTHER_STEP], capture_output=True, text=True, check=True
    )
    assert run.stdout == "ranks [1] came to another commit than step 0\n"


@pytest.mark.parametrize(
    ("norms", "losses", "missing"),
    [({0: 1.0}, {0: 1.0}, "gradient norms of layers"), ({0: 1.0, 1: 1.0}, {}, "losses of microbatches")],
)
def test_a_commit_with_a_part_missing_is_refused(
    norms: dict[int, float], losses: dict[int, float], missing: str
) -> None:
    with pytest.raises(CommitError, match=missing):
        decide(
            [record(0, squared_norms=norms, losses=losses)], microbatches=1, layers=2, clip_norm=None, lr=0.1
        )
