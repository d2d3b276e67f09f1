"""Variants of a job's configuration, for benchmarks and tests."""

from __future__ import annotations

from typing import Any

from workers.config import WorkerConfig


def changed(config: WorkerConfig, **changes: Any) -> WorkerConfig:
    """`config` with other sections, or other keys of `[job]`, `[pipeline]` and `[cluster]`, each by its name."""
    sections = {name: changes.pop(name) for name in WorkerConfig.model_fields if name in changes}
    for name in ("job", "pipeline", "cluster"):
        section = sections.get(name, getattr(config, name))
        keys = {key: changes.pop(key) for key in type(section).model_fields if key in changes}
        sections[name] = section.model_copy(update=keys)
    assert not changes, f"no keys of these sections: {', '.join(changes)}"
    return config.model_copy(update=sections)
