"""GPipe: all forwards, then all backwards (Huang et al. 2019). One stage per rank."""

from __future__ import annotations

from planner.ir import Action, ActionKind, Program, Schedule


def gpipe(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Makespan 3(M + P - 1) at F = 1, B = 2; every rank holds all M microbatches in flight.

    Unlike in the paper's figure, backwards also run in ascending microbatch order, so that gradients add up in the
    same order as in every other family.
    """
    return Schedule(
        "gpipe", ranks * chunks, microbatches, tuple(_program(rank, microbatches) for rank in range(ranks))
    )


def _program(stage: int, microbatches: int) -> Program:
    forwards = [Action(ActionKind.FORWARD, stage, index) for index in range(microbatches)]
    backwards = [Action(ActionKind.BACKWARD, stage, index) for index in range(microbatches)]
    return (*forwards, *backwards)
