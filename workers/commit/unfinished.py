"""The first messages between the ranks of a new generation: what the previous one left unfinished.

Values and their agreement; no effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.shards import Piece
from workers.protocol.carried import Carried
from workers.protocol.errors import JobError
from workers.protocol.goals import PastValidation, told_together
from workers.protocol.orders import Request


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """Progress on the commit of `step`, as known to one rank or to all ranks together."""

    step: int
    requests: frozenset[Request] = frozenset()
    """Requests that the commit carried."""
    validated: bool = False
    """Whether the validation after it is done."""
    best: float | None = None
    """The best value of `checkpoint.keep_best` so far, if it is known."""
    begun: int = 0
    """Step of the newest checkpoint begun; 0 for none."""
    whole: int = 0
    """Step of the newest checkpoint known to be complete; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """A rank's first message to the others in a generation."""

    host: str
    port: int
    """Port at which it serves layers."""
    left: Unfinished | None
    """Progress on the commit at the start of the generation, if the rank took part in one."""
    lacks: tuple[Piece, ...] = ()
    """Layers, or shards, that it keeps standbys of and fetches from their owners."""
    carried: Carried | None = None
    """State besides layers that the next step follows, where the rank knows that."""
    validations: tuple[PastValidation, ...] = ()
    """Validations of the job that the rank knows, some perhaps of steps that were undone since."""
    keeps: bool = False
    """Whether it keeps what frozen layers make of samples, for others to ask for."""


def agreed_carried(greetings: Sequence[Greeting], step: int) -> Carried:
    """State that the step after `step` follows, from a rank that knows it: from the newest commit, or the checkpoint.

    Raises:
        JobError: none knows it.
    """
    known = {greeting.carried for greeting in greetings if greeting.carried is not None}
    if not known:
        raise JobError(
            f"no rank that is left knows the loss scale, the frozen prefix and the batch after step {step}: resume from"
            " the newest checkpoint, which holds them"
        )
    assert len(known) == 1, f"ranks differ in what the step after {step} follows: {known}"
    (carried,) = known
    return carried


def agreed_validations(greetings: Sequence[Greeting], step: int) -> tuple[PastValidation, ...]:
    """The job's validations after steps up to `step`, as far as any rank knows them."""
    return told_together((greeting.validations for greeting in greetings), step)


def agree(greetings: Sequence[Greeting], step: int) -> Unfinished | None:
    """Combine what the ranks know of the commit of `step`; None if no rank took part in it."""
    known = [greeting.left for greeting in greetings if greeting.left and greeting.left.step == step]
    if not known:
        return None
    return Unfinished(
        step=step,
        requests=frozenset[Request]().union(*(left.requests for left in known)),
        validated=any(left.validated for left in known),
        best=next((left.best for left in known if left.best is not None), None),
        begun=max(left.begun for left in known),
        whole=max(left.whole for left in known),
    )
