"""Job settings that layer costs depend on, beside those that a profile has fields for. Knows no torch."""

from __future__ import annotations

from typing import Any

from workers.config import WorkerConfig

_OF_TEXT = ("family", "heads", "context", "dropout")
_OF_FAMILY = {
    "gpt": _OF_TEXT,
    "llama": _OF_TEXT,
    "vit": ("family", "heads", "image_size", "patch_size", "channels", "dropout"),
}
"""Model family -> cost settings that the layers' parameter counts do not tell."""


def cost_settings(config: WorkerConfig) -> dict[str, Any]:
    """`section.key` of the spec -> its value, as JSON has it."""
    built_in = _OF_FAMILY.get(config.model.family or "", ())
    keys: dict[str, tuple[str, ...]] = {
        "model": ("factory", "arguments") if config.model.factory is not None else built_in,
        "data": ("source", "arguments") if ":" in config.data.source else (),
        "optimizer": ("name",),
    }
    given = config.model_dump(mode="json", include=set(keys))
    settings = {f"{section}.{key}": given[section][key] for section, of in keys.items() for key in of}
    return {**settings, "job.compile": True} if config.compile else settings
