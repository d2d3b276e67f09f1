"""The sections of a job's page: what each is made from, and which events make it old.

Each is also served alone, and the page's script swaps it in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dashboard.pages.controls import controls_part
from dashboard.pages.head import head
from dashboard.pages.output_page import newest_output
from dashboard.pages.shown import Shown
from dashboard.pages.templating import rendered
from orchestrator.analysis.layer_map import layer_map
from orchestrator.history.notes import NOTED
from orchestrator.report.run.decision_log import decision_log
from orchestrator.report.run.freezing import freezing
from orchestrator.report.run.moves import moves
from orchestrator.report.run.planning import planning
from orchestrator.report.run.rank_memory import rank_memory
from orchestrator.report.run.recovery import recovery
from orchestrator.report.run.sections import checkpoints, notes, spec, training
from orchestrator.report.run.speeds import speeds
from orchestrator.report.run.surroundings import surroundings
from orchestrator.report.run.what_ran import what_ran
from orchestrator.report.step.timeline import timeline

LIFE = ("Submitted", "Formed", "Paused", "Finished", "Failed", "Regrouped", "Requested")
"""Events after which most of a page is another one."""
RANKS = (*LIFE, "Placing", "RankStarted", "RankFailed", "NoticeReport", "Noticed")
PLANS = (*LIFE, "Issued", "SwitchReport", "Migrated", "FreezeSolved")
SPEEDS = ("SpeedsChanged", "LinksTimed", "Adapted")
"""Events about ranks that are slower or faster than the profile says."""


@dataclass(frozen=True)
class PageSection:
    """A section."""

    name: str
    make: Callable[[Shown], object]
    """Its facts; None: it has nothing to show."""
    kinds: tuple[str, ...]
    """Kinds of events after which it is made again."""
    title: str = ""
    """In the page's contents; empty: it is not there."""
    late: bool = False
    """Whether it is loaded after the page, because it is large."""
    every_ms: int = 1000
    """Minimum interval between fetches, in ms."""

    @property
    def template(self) -> str:
        return f"section_{self.name}.html.j2"


def _commands(shown: Shown) -> object:
    entries = list(shown.view.commands.entries.values())[-5:]
    return entries[::-1] or None


SECTIONS = (
    PageSection("head", head, ("StepReport", "ValidationReport", *RANKS, *PLANS), every_ms=500),
    PageSection("controls", controls_part, ("Requested", "FreezeChanged", "Undrained", *RANKS)),
    PageSection(
        "commands",
        _commands,
        ("Commanded", "Answered", "Migrated", "CheckpointReport", *LIFE),
        "Controls sent",
        every_ms=500,
    ),
    PageSection(
        "notes",
        lambda shown: notes(shown.view) or None,
        (*NOTED, *RANKS),
        "Notes",
    ),
    PageSection(
        "map",
        lambda shown: layer_map(shown.view),
        ("StandbyReport", "Commanded", "Answered", *RANKS, *PLANS),
        "Layers",
        every_ms=500,
    ),
    PageSection(
        "training",
        lambda shown: training(shown.view),
        ("StepReport", "ValidationReport", "Formed", "Issued"),
        "Curves",
    ),
    PageSection(
        "timeline",
        lambda shown: timeline(shown.view, shown.profile()),
        ("TimelineReport",),
        "Timeline",
        late=True,
    ),
    PageSection(
        "memory",
        lambda shown: rank_memory(shown.view, shown.profile()),
        ("Issued", "SwitchReport", "Formed", "TimelineReport"),
        "Memory",
        late=True,
        every_ms=5000,
    ),
    PageSection(
        "freezing",
        lambda shown: freezing(shown.view),
        (
            "ActivationsUsed",
            "FreezeReport",
            "FreezeSolved",
            "FreezeStarted",
            "PrefixFrozen",
            "LayoutWeighed",
            "Issued",
            "Regrouped",
            "Submitted",
        ),
        "Freezing",
    ),
    PageSection("plan", lambda shown: planning(shown.view), PLANS, "Plan"),
    PageSection(
        "decisions",
        lambda shown: decision_log(shown.view) or None,
        (*PLANS, *SPEEDS, "FreezeStarted", "PrefixFrozen"),
        "Decisions",
    ),
    PageSection(
        "recovery", lambda shown: recovery(shown.view), ("Regrouped", "Formed", "Rehearsed"), "Recoveries"
    ),
    PageSection("speeds", lambda shown: speeds(shown.view), (*SPEEDS, "Issued", "Migrated"), "Speeds"),
    PageSection(
        "surroundings", lambda shown: surroundings(shown.view), ("Sampled",), "Surroundings", every_ms=5000
    ),
    PageSection("moves", lambda shown: moves(shown.view), ("Migrated",), "Moves"),
    PageSection("checkpoints", lambda shown: checkpoints(shown.view), ("CheckpointReport",), "Checkpoints"),
    PageSection("what", lambda shown: what_ran(shown.view) or None, PLANS, "What runs"),
    PageSection("sample", lambda shown: shown.view.sample, ("SampleReport",), "Sample"),
    PageSection(
        "output", newest_output, ("StepReport", "WarningReport", *RANKS), "Output", late=True, every_ms=5000
    ),
    PageSection("spec", lambda shown: spec(shown.view) or None, ("Submitted",), "Spec"),
)
BY_NAME = {section.name: section for section in SECTIONS}


def render(section: PageSection, shown: Shown) -> Markup:
    """The body of `section`; empty if it has nothing to show."""
    part = section.make(shown)
    return Markup("") if part is None else rendered(section.template, part=part, shown=shown)


def render_first(shown: Shown) -> Sequence[tuple[PageSection, Markup]]:
    """All sections of the page as first served: late ones have no body yet."""
    return [(section, Markup("") if section.late else render(section, shown)) for section in SECTIONS]
