"""Job settings that layer costs depend on, beside those that a profile has fields for. Knows no torch."""

from __future__ import annotations

from typing import Any

from workers.config import WorkerConfig


def cost_settings(config: WorkerConfig) -> dict[str, Any]:
    """`section.key` of the spec -> its value, as JSON has it."""
    keys: dict[str, tuple[str, ...]] = {
        "model": config.model.cost_keys,
        "data": ("source", "arguments") if ":" in config.data.source else (),
        "optimizer": ("name",),
    }
    given = config.model_dump(mode="json", include=set(keys))
    settings = {f"{section}.{key}": given[section][key] for section, of in keys.items() for key in of}
    if config.model.fixed:
        settings["model.fixed"] = given["model"]["fixed"]
    if config.model.lora is not None:
        settings["model.lora"] = given["model"]["lora"]
    return {**settings, "job.compile": True} if config.job.compile else settings
