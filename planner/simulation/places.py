"""The devices of a plan's places and the links between them, as far as a profile knows them."""

from __future__ import annotations

from planner.plan import Plan
from planner.profile import DeviceProfile, Link, Profile


def device_of(profile: Profile, plan: Plan, place: int) -> DeviceProfile:
    """The device of a place: that of the first pipeline."""
    return profile.cluster.devices[plan.place(place).rank]


def link_between(profile: Profile, plan: Plan, source: int, target: int) -> Link | None:
    """The link between two places: the measured one, that of the first pipeline, or any; None if there is none."""
    links = profile.cluster.links
    if max(source, target) < len(links):
        return links[source][target]
    source, target = plan.place(source).rank, plan.place(target).rank
    if source != target and max(source, target) < len(links):
        return links[source][target]
    return next((link for row in links for link in row if link is not None), None)
