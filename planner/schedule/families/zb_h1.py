"""ZB-H1: 1F1B with split backwards whose weight gradients fill the drain (Qi et al. 2024, section 2.1)."""

from __future__ import annotations

from planner.ir import Action, ActionKind, Program, Schedule


def zb_h1(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Makespan M(F + I + W) + (P - 1)(F + I - W) for M >= P and W <= min(F, I).

    That is 3M + P - 1 at F = I = W = 1, a third of 1F1B's bubble; with M < P it is 2(M + P) - 1. Microbatches
    in flight on rank s: min(M, P - s) up to the input gradient, as in 1F1B, and min(M, P) up to the weight
    gradient, as rank s lags s weight gradients behind: no rank holds more than 1F1B's first.
    """
    return Schedule(
        "zb-h1",
        ranks * chunks,
        microbatches,
        tuple(_program(rank, microbatches, warmup=ranks - 1 - rank, lag=rank) for rank in range(ranks)),
    )


def _program(stage: int, microbatches: int, warmup: int, lag: int) -> Program:
    """`warmup` forwards run ahead of the input gradients, the weight gradients lag `lag` behind them."""
    program = [Action(ActionKind.FORWARD, stage, index) for index in range(min(warmup, microbatches))]
    for index in range(microbatches):
        if index + warmup < microbatches:
            program.append(Action(ActionKind.FORWARD, stage, index + warmup))
        program.append(Action(ActionKind.INPUT_GRAD, stage, index))
        if index >= lag:
            program.append(Action(ActionKind.WEIGHT_GRAD, stage, index - lag))
    last = range(max(microbatches - lag, 0), microbatches)
    program.extend(Action(ActionKind.WEIGHT_GRAD, stage, index) for index in last)
    return tuple(program)
