"""1F1B: one forward, one backward in turn (PipeDream-Flush, Narayanan et al. 2021). One stage per rank."""

from __future__ import annotations

from planner.ir import Action, ActionKind, Program, Schedule


def one_f_one_b(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """GPipe's makespan, 3(M + P - 1) at F = 1, B = 2, with min(M, P - s) microbatches in flight on rank s."""
    return Schedule(
        "1f1b",
        ranks * chunks,
        microbatches,
        tuple(_program(rank, microbatches, warmup=ranks - 1 - rank) for rank in range(ranks)),
    )


def _program(stage: int, microbatches: int, warmup: int) -> Program:
    """`warmup` forwards run ahead of the backwards."""
    program = [Action(ActionKind.FORWARD, stage, index) for index in range(min(warmup, microbatches))]
    for index in range(microbatches):
        if index + warmup < microbatches:
            program.append(Action(ActionKind.FORWARD, stage, index + warmup))
        program.append(Action(ActionKind.BACKWARD, stage, index))
    return tuple(program)
