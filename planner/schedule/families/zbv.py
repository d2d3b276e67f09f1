"""ZB-V: two chunks per rank, placed as a V, with split backwards (Qi et al. 2024, section 6)."""

from __future__ import annotations

from planner.ir import Action, ActionKind, Program, Schedule


def zbv(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Makespan 6M + P - 1 at F = I = W = 1 per chunk, for M >= 2P - 1: no rank idles once begun.

    At most min(2M, 2P) chunk activations are in flight on any rank, as many as on 1F1B's first rank. With fewer
    than 2P - 1 microbatches the order is the same without the missing ones.
    """
    full = max(microbatches, 2 * ranks - 1)
    programs = (_program(rank, ranks, full) for rank in range(ranks))
    return Schedule(
        "zbv",
        ranks * chunks,
        microbatches,
        tuple(tuple(action for action in program if action.index < microbatches) for program in programs),
    )


def _program(rank: int, ranks: int, microbatches: int) -> Program:
    """For M >= 2P - 1. The downward chunk is stage s, the upward one 2P - 1 - s."""
    down, up = rank, 2 * ranks - 1 - rank
    program: list[Action] = []
    taken: dict[tuple[ActionKind, int], int] = {}

    def add(stage: int, *kinds: ActionKind) -> None:
        """The next microbatch of each kind on this stage."""
        for kind in kinds:
            index = taken.get((kind, stage), 0)
            program.append(Action(kind, stage, index))
            taken[kind, stage] = index + 1

    forward, input_grad, weight_grad = ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD

    # Fill: downward forwards until the first microbatch comes back up, then both in turn.
    for _ in range(2 * (ranks - rank) - 1):
        add(down, forward)
    for _ in range(rank):
        add(up, forward)
        add(down, forward)
    for _ in range(ranks - rank):
        add(up, forward, input_grad, weight_grad)
    # Steady state: both chunks in turn, while forwards are left; the downward chunk's end first.
    for _ in range(microbatches - 2 * ranks + rank + 1):
        add(down, forward, input_grad, weight_grad)
        add(up, forward, input_grad, weight_grad)
    for _ in range(ranks - 1 - rank):
        add(down, input_grad, weight_grad)
        add(up, forward, input_grad, weight_grad)
    # Drain: input gradients first, other ranks wait for them; the weight gradients left over fill the end.
    for _ in range(rank):
        add(down, input_grad)
        add(up, input_grad)
    for _ in range(ranks - rank):
        add(down, input_grad, weight_grad)
    for stage in (up, down):
        for _ in range(rank):
            add(stage, weight_grad)
    return tuple(program)
