"""The lifecycle's states and transitions as markdown, made from the table itself.

`docs/architecture/lifecycle.md` is the output of `python -m orchestrator.lifecycle.reference`; a test keeps the two
equal. Where a transition leads stands in its return type, which pyright holds against its code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, get_args

from orchestrator.lifecycle.machine import TABLE
from orchestrator.lifecycle.states import Assessed, Assessing, Closing, State
from orchestrator.lifecycle.stimuli import Stimulus

STATES: tuple[type[State], ...] = get_args(State)
STIMULI: tuple[type[Stimulus], ...] = get_args(Stimulus)

_INTRODUCTION = """# The lifecycle of a job

`orchestrator/lifecycle/machine.py` is a pure function: order, state and stimulus to the next state and the effects to
carry out. This page is its table, the output of `python -m orchestrator.lifecycle.reference`. A pair of state and
stimulus that is not in it raises. [Recovery](recovery.md) and [jobs](jobs.md) say what happens in the states.

An arrow to Assessing may lead on at once, to wherever Assessing leads, if no rank has to be asked. Not drawn, as they
do so from most states: {common} lead to Closing.
"""


def reference() -> str:
    """The whole page."""
    common = [stimulus for stimulus in STIMULI if _ends_most(stimulus)]
    introduction = _INTRODUCTION.format(common=_listed(common))
    parts = (_diagram(common), _states(), _transitions(), _stimuli())
    return "\n".join([introduction, *("\n".join(part) + "\n" for part in parts)])


def leads_to(state: type[State], stimulus: type[Stimulus]) -> tuple[type[State], ...]:
    """States that the transition declares, `state` itself among them if the job may stay in it."""
    return tuple(dict.fromkeys(_declared(TABLE[state, stimulus], state)))


def _declared(transition: Callable[..., Any], state: type[State]) -> Iterator[type[State]]:
    """Read `-> Step[A | B]`: its names are states, type variables (the present state) or `Assessed`."""
    known = vars(sys.modules[transition.__module__])
    for name in re.findall(r"\w+", transition.__annotations__["return"].removeprefix("Step")):
        if known[name] == Assessed:
            yield from get_args(Assessed) if state is Assessing else (Assessing,)
        else:
            yield state if isinstance(known[name], TypeVar) else known[name]


def _ends_most(stimulus: type[Stimulus]) -> bool:
    """Whether `stimulus` may end the job in at least half of the states."""
    ends = [state for state in STATES if stimulus in _allowed(state) and Closing in leads_to(state, stimulus)]
    return 2 * len(ends) >= len(STATES)


def _allowed(state: type[State]) -> list[type[Stimulus]]:
    return [stimulus for stimulus in STIMULI if (state, stimulus) in TABLE]


def _diagram(common: list[type[Stimulus]]) -> list[str]:
    lines = ["```mermaid", "stateDiagram-v2", f"  [*] --> {STATES[0].__name__}"]
    for state in STATES:
        arrows: dict[type[State], list[type[Stimulus]]] = {}
        for stimulus in _allowed(state):
            for after in leads_to(state, stimulus):
                if after is not state and not (after is Closing and stimulus in common):
                    arrows.setdefault(after, []).append(stimulus)
        lines += [
            f"  {state.__name__} --> {after.__name__}: {_listed(stimuli)}"
            for after, stimuli in arrows.items()
        ]
        if all(leads_to(state, stimulus) == (state,) for stimulus in _allowed(state)):
            lines.append(f"  {state.__name__} --> [*]")
    return [*lines, "```"]


def _states() -> list[str]:
    rows = [f"| {state.__name__} | {_summary(state)} |" for state in STATES]
    return ["## States", "", "| state | meaning |", "|---|---|", *rows]


def _transitions() -> list[str]:
    """A row for each pair of a state and where it leads; the last one of a state has what never ends it."""
    lines = ["## Transitions", "", "| state | stimulus | leads to |", "|---|---|---|"]
    for state in STATES:
        stimuli: dict[tuple[type[State], ...], list[type[Stimulus]]] = {}
        for stimulus in _allowed(state):
            stimuli.setdefault(leads_to(state, stimulus), []).append(stimulus)
        staying = stimuli.pop((state,), [])
        for after, which in stimuli.items():
            others = _listed(each for each in after if each is not state)
            lines.append(
                f"| {state.__name__} | {_listed(which)} | {'stays, ' if state in after else ''}{others} |"
            )
        lines.append(f"| {state.__name__} | {_listed(staying)} | stays |")
    return lines


def _stimuli() -> list[str]:
    rows = [f"| {stimulus.__name__} | {_summary(stimulus)} |" for stimulus in STIMULI]
    return ["## Stimuli", "", "| stimulus | meaning |", "|---|---|", *rows]


def _listed(kinds: Iterable[type[Any]]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


def _summary(kind: type[Any]) -> str:
    """The first paragraph of the docstring, for a cell."""
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
