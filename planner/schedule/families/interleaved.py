"""Interleaved 1F1B: v chunks per rank, assigned round-robin (Narayanan et al. 2021, section 2.2)."""

from __future__ import annotations

from planner.ir import Action, ActionKind, Program, Schedule


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Makespan 3Mv + 3(P - 1) at F = 1, B = 2 per chunk, for M a multiple of P.

    At most min(Mv, 2(P - 1 - s) + (v - 1)P + 1) chunk activations are in flight on rank s.
    """
    return Schedule(
        "interleaved",
        ranks * chunks,
        microbatches,
        tuple(_program(rank, ranks, microbatches, chunks) for rank in range(ranks)),
    )


def _program(rank: int, ranks: int, microbatches: int, chunks: int) -> Program:
    """1F1B over the turns (round of P microbatches, chunk, microbatch); backwards from the last chunk."""
    total = microbatches * chunks
    warmup = min(total, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)

    def turn(kind: ActionKind, number: int) -> Action:
        block, within = divmod(number, ranks)
        round_, chunk = divmod(block, chunks)
        if kind is ActionKind.BACKWARD:
            chunk = chunks - 1 - chunk
        return Action(kind, chunk * ranks + rank, round_ * ranks + within)

    program = [turn(ActionKind.FORWARD, number) for number in range(warmup)]
    for number in range(total):
        if number + warmup < total:
            program.append(turn(ActionKind.FORWARD, number + warmup))
        program.append(turn(ActionKind.BACKWARD, number))
    return tuple(program)
