"""Parameters and bodies shared by several routes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header, Path
from pydantic import BaseModel, ConfigDict

from dashboard.api.examples import SUMMARY, example
from dashboard.service.mistakes import JOB, KEY

JobName = Annotated[
    str,
    Path(pattern=JOB, description="The job's name.", examples=["gpt"]),
]
RunName = Annotated[
    str, Path(min_length=1, max_length=400, description="The run's name, as listed.", examples=["gpt"])
]

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=KEY,
        description="Chosen by the sender: a control that is sent twice with one key is done once.",
        examples=["5f2c"],
    ),
]


class StrictModel(BaseModel):
    """A body: unknown keys are refused, docstrings describe the fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="strings")


class Answer(
    StrictModel,
    json_schema_extra=example(
        {
            "job": "gpt",
            "id": "5f2c",
            "text": "writes a checkpoint after the step in flight",
            "done": None,
            "step": None,
        }
    ),
):
    """A control that the job's controller has accepted."""

    job: str
    id: str
    """The command's id: send the same Idempotency-Key again, and nothing is done twice."""
    text: str
    """In words: what happens now, or what was done."""
    done: bool | None = None
    """True once it is done; null while it is under way."""
    step: int | None = None
    """Steps committed when it was done."""


class Summary(StrictModel, json_schema_extra=example(SUMMARY)):
    """A job in a few numbers. Times are in seconds since the Unix epoch."""

    job: str
    state: str
    """`submitting`, `refused`, `pending` (its controller has told nothing yet), `starting`, `training`, `waiting`,
    `paused`, `finished`, `stopped`, `failed` or `lost`."""
    step: int
    """Steps committed."""
    last_step: int
    """The step at which it is done."""
    loss: float | None
    losses: list[float]
    """The losses so far, at most 60 of them, evenly spread: always the first and the newest."""
    step_s: float | None
    """Median seconds of the newest steps."""
    tokens_per_s: float | None
    """Over the newest steps; samples per second if the model has no tokens. Null while the job is paused or waits."""
    per_s: str
    """`tokens/s` or `samples/s`."""
    samples_per_hour: float | None
    """Over the newest steps; null while the job is paused or waits."""
    flops_per_s: float | None
    """Floating-point operations per second that the model's passes take, over the newest steps; null where they cannot
    be counted."""
    mfu: float | None
    """Their share of what the makers publish for the ranks' devices; null where they do not."""
    epochs: float | None
    """Passes over the training samples so far."""
    validation_loss: float | None
    """The newest one."""
    metrics: dict[str, float]
    """Metrics of the newest validation."""
    watched: str
    """The metric that is to get better: of `checkpoint.keep_best`, else of `job.stop_at`, else the loss."""
    best: float | None
    """Its best value in a validation so far."""
    best_step: int | None
    """The step of that validation."""
    time_to_target_s: float | None
    """Duration of the steps that stand up to the first validation that reached `job.stop_at`; null if none did."""
    why: str
    """Reason, in words, why validations ended it: the metric that reached `job.stop_at`, or what did not get better for
    `job.patience`; empty if none did."""
    remaining_s: float | None
    """Until the last step, at the pace of the newest steps; null while the job does not train."""
    ranks: int
    spares: int
    effective_time_ratio: float | None
    """Time of committed steps that stand over all time since the first step began."""
    recoveries: int
    recovery_s: float
    """Seconds from signs of loss until the job trained again, summed."""
    steps_rerun: int
    plan_version: str | None
    """`EPOCH.VERSION` of the newest plan: send it as If-Match."""
    folder: str
    trouble: str
    """Why what is shown may be old; empty if all is well."""
    started_s: float
    ended_s: float | None
    """Time of the last event; null while the job runs."""
    duration_s: float
    """Seconds that all starts have lasted, without the time between them."""
    model: str
    """In a few words."""


JsonObject = dict[str, Any]
