"""In a simulated cluster where anything may happen at any time, a job goes on or says why it cannot."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_up_cluster import World

from orchestrator.lifecycle.scaling import size_of
from orchestrator.lifecycle.states import Closing, JobFailed, JobFinished, Stopping, Training, Waiting
from workers.config import ElasticConfig


@example(  # A rank came up while the last of too few was asked for its position: the job waited beside it.
    seed=664,
    spares=1,
    min_ranks=2,
    grow=True,
    redundancy="peer",
    salvage="none",
    attempts=1000,
    shared=False,
)
@example(  # All ranks have to go, and are asked to end their generation before they would shrink it.
    seed=376,
    spares=0,
    min_ranks=1,
    grow=False,
    redundancy="checkpoint",
    salvage="none",
    attempts=1000,
    shared=True,
)
@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    spares=st.integers(0, 2),
    min_ranks=st.integers(1, 3),
    grow=st.booleans(),
    redundancy=st.sampled_from(["peer", "checkpoint"]),
    salvage=st.sampled_from(["none", "weights"]),
    attempts=st.sampled_from([3, 1000]),
    shared=st.booleans(),
)
def test_whatever_happens_the_job_goes_on_or_says_why_not(
    seed: int,
    spares: int,
    min_ranks: int,
    grow: bool,
    redundancy: str,
    salvage: str,
    attempts: int,
    shared: bool,
) -> None:
    elastic = ElasticConfig(
        spares=spares,
        min_ranks=min_ranks,
        grow=grow,
        redundancy=redundancy,  # pyright: ignore[reportArgumentType]
        salvage=salvage,  # pyright: ignore[reportArgumentType]
        attempts=attempts,
    )
    world = World(seed, elastic, shared=shared)
    world.run(60)
    assert isinstance(world.state, Training | Stopping | Waiting | Closing | JobFailed | JobFinished), (
        world.state
    )
    if isinstance(world.state, Training | Stopping):
        job = world.state.job
        assert set(job.membership.members) <= job.membership.alive
        assert not job.membership.starting, "who never came up is called no more"
        size = size_of(world.order, job)
        if job.intents.asked is None and isinstance(world.state, Training):
            assert len(job.membership.members) <= size.places, "a job that was to shrink has not"
            up = job.membership.alive - job.membership.going
            assert len(up) <= size.places + size.spares, "ranks that nobody wants are kept"
        assert set(world.standing(job.membership.members)) == set(job.membership.members), (
            "a loss went unheard"
        )
    if isinstance(world.state, Waiting):
        job = world.state.job
        assert not job.membership.starting
        assert len(job.membership.alive - job.membership.going) < min_ranks, "there are enough, and it waits"


def test_some_of_these_clusters_go_on_with_weights_whose_moments_are_lost() -> None:
    elastic = ElasticConfig(salvage="weights", redundancy="checkpoint", attempts=1000)
    for shared in (False, True):
        worlds = [World(seed, elastic, shared=shared) for seed in range(30)]
        for world in worlds:
            world.run(60)
        assert any(world.salvages for world in worlds)
