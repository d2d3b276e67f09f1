"""Names that events had before a line carried the name of its class. A line still has this name as its `kind`, for
scripts that look for it; an event that was added later has the name of its class there too. Never grows."""

from __future__ import annotations

from collections.abc import Mapping

EARLIER_NAMES: Mapping[str, str] = {
    "submitted": "Submitted",
    "plan": "Issued",
    "placing": "Placing",
    "rank_started": "RankStarted",
    "formed": "Formed",
    "skipped": "Skipped",
    "requested": "Requested",
    "commanded": "Commanded",
    "answered": "Answered",
    "planner_started": "PlannerStarted",
    "freeze_solved": "FreezeSolved",
    "freeze_changed": "FreezeChanged",
    "regrouped": "Regrouped",
    "migrated": "Migrated",
    "scaled": "Scaled",
    "dismissed": "Dismissed",
    "paused": "Paused",
    "noticed": "Noticed",
    "undrained": "Undrained",
    "profile_doubted": "ProfileDoubted",
    "speeds": "SpeedsChanged",
    "sampled": "Sampled",
    "layers_timed": "LayersTimed",
    "links_timed": "LinksTimed",
    "adapted": "Adapted",
    "out_of_memory": "OutOfMemory",
    "memory_limit": "MemoryLimited",
    "warned": "Warned",
    "stalled": "Stalled",
    "rank_ended": "RankEnded",
    "rank_failed": "RankFailed",
    "finished": "Finished",
    "failed": "Failed",
    "step": "StepReport",
    "validation": "ValidationReport",
    "checkpoint": "CheckpointReport",
    "timeline": "TimelineReport",
    "sample": "SampleReport",
    "freeze_started": "FreezeStarted",
    "freeze": "FreezeReport",
    "frozen_counts": "FrozenCounts",
    "curvature": "CurvatureReport",
    "standbys": "StandbyReport",
    "switch": "SwitchReport",
    "copied_ahead": "CopiedAhead",
    "fault": "FaultReport",
    "rehearsed": "Rehearsed",
    "disturbed": "Disturbed",
    "notice": "NoticeReport",
    "memory_low": "MemoryLow",
    "layers_checked": "LayersChecked",
    "rescued": "Rescued",
    "warning": "WarningReport",
}
"""Name of before -> name of the class."""

EARLIER_NAME_OF: Mapping[str, str] = {name: earlier for earlier, name in EARLIER_NAMES.items()}
"""Name of a class -> its earlier name."""
