"""The folder of kept profiles, which of them deserve no trust, and which were found to be wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile

from orchestrator.events.types import ProfileDoubted
from orchestrator.quantities import percent, seconds
from planner.profile import Profile
from planner.wording import counted

CACHE_VARIABLE = "FRESHET_PROFILES"
"""Environment variable that names another folder for the cache."""
OTHERS = 0.15
"""Share of a machine's processors that, busy with other work, makes a measurement on CPUs noisy."""
SPREAD = 0.3
"""Interquartile range of a rank's repeats over their median from which a measurement is noisy."""
OLD_S = 7 * 24 * 3600.0
"""Age from which a profile is old."""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder of kept profiles: `FRESHET_PROFILES`, or `freshet/profiles` in the user's cache folder."""
    if environment.get(CACHE_VARIABLE):
        return Path(environment[CACHE_VARIABLE])
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "freshet" / "profiles"


def noise(profile: Profile) -> str | None:
    """Disturbance of the measurement, in words; None: nothing that counts, or nothing that is known."""
    kind = profile.cluster.devices[0].kind
    if profile.noise is None or kind == "emulated":
        return None
    if kind == "cpu" and profile.noise.others > OTHERS:
        return f"other work took {percent(profile.noise.others)} of the processors"
    if profile.noise.spread > SPREAD:
        return f"its repeats differed by {percent(profile.noise.spread)}"
    return None


def doubts(profile: Profile, now_s: float) -> tuple[str, ...]:
    """Why the numbers of `profile` may not hold, each with a way out; empty: no reason is known.

    Args:
        now_s: seconds since the Unix epoch.
    """
    found: list[str] = []
    when = f" of {day(profile.measured_s)}" if profile.measured_s is not None else ""
    if (disturbed := noise(profile)) is not None:
        found.append(
            f"the profile{when} is noisy: while it was measured, {disturbed}. Predictions may be off; freshet profile"
            " measures again, best on a quiet machine"
        )
    if profile.measured_s is not None and (age_s := now_s - profile.measured_s) > OLD_S:
        found.append(
            f"the profile{when} is {counted(int(age_s // 86_400), 'day')} old; freshet profile measures again"
        )
    return tuple(found)


def day(time_s: float) -> str:
    """`2026-11-20`."""
    return datetime.fromtimestamp(time_s, UTC).date().isoformat()


@dataclass(frozen=True, kw_only=True)
class Stale:
    """The steps of a job contradict a kept profile."""

    profile_s: float | None
    """When the profile was measured; another one under the same key is not meant."""
    predicted_s: float
    """A step, by the profile."""
    took_s: float
    """A step, as measured."""

    def __str__(self) -> str:
        return f"steps took {seconds(self.took_s)}, and {seconds(self.predicted_s)} were predicted"


def mark_stale(folder: Path, doubt: ProfileDoubted) -> None:
    """Have the next start measure the profile again that `doubt` is about, if the cache `folder` has it and a new
    measurement may come out otherwise. A folder that cannot be written to stays as it is."""
    if doubt.again and (folder / f"{doubt.key}.json").exists():
        wrong = Stale(profile_s=doubt.profile_s, predicted_s=doubt.predicted_s, took_s=doubt.took_s)
        with suppress(OSError), NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            file.write(json.dumps(asdict(wrong)))
            file.close()
            os.replace(file.name, _mark(folder, doubt.key))


def stale(folder: Path, profile: Profile) -> Stale | None:
    """Why the kept `profile` is to be measured again; None: it is not."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        values = json.loads(_mark(folder, profile.key).read_text())
        found = Stale(**{name: values.get(name) for name in Stale.__dataclass_fields__})
        if found.profile_s == profile.measured_s and found.predicted_s > 0 and found.took_s > 0:
            return found
    return None


def forget_stale(folder: Path, key: str) -> None:
    """Remove the mark of the profile `key`, which was measured again.

    Raises:
        OSError: the folder cannot be written to.
    """
    _mark(folder, key).unlink(missing_ok=True)


def _mark(folder: Path, key: str) -> Path:
    return folder / f"{key}.stale"
