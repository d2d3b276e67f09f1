"""The link between two places of a plan, as far as a profile knows it."""

from __future__ import annotations

from planner.plan import Plan
from planner.profile import Link, Profile


def link_between(profile: Profile, plan: Plan, source: int, target: int) -> Link | None:
    """The link between two places: the measured one, that of the first pipeline, or any; None if there is none."""
    links = profile.cluster.links
    if max(source, target) < len(links):
        return links[source][target]
    source, target = plan.place(source).rank, plan.place(target).rank
    if source != target and max(source, target) < len(links):
        return links[source][target]
    return next((link for row in links for link in row if link is not None), None)
