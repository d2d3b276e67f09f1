"""Outlets from the controller to other systems: the job's events to sinks, and its metrics to Ray.

Each outlet works in a thread of its own, beside the event loop. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.events.types import Record, Warned
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.stimuli import Noted
from orchestrator.spec.job_spec import LoggingConfig
from orchestrator.telemetry.ray_metrics import RayMetrics
from orchestrator.telemetry.samples import samples
from orchestrator.telemetry.sinks import SinkThread
from orchestrator.telemetry.wanted import openers

METRICS_S = 5.0
"""Between two records of the metrics; Ray passes them on every 10 s."""
CLOSE_S = 15.0
"""Time limit for the sinks once the job has ended."""


class Outlets:
    """The outlets of one job. Create and use it on an event loop.

    Args:
        view: of the job so far; its steps were passed on by earlier controllers.
        spec: the resolved spec, as JSON values.
        folder: the local folder of the event log.
        post: takes warnings.
    """

    def __init__(
        self, view: JobView, spec: dict[str, Any], folder: Path, post: Callable[[Noted], None]
    ) -> None:
        loop = asyncio.get_running_loop()

        def warn(text: str) -> None:
            with suppress(RuntimeError):  # the loop is closed: the job is over
                loop.call_soon_threadsafe(post, Noted(Warned(text=text)))

        job = spec["job"]["name"]
        opening = openers(
            LoggingConfig.model_validate(spec.get("logging", {})),
            job=job,
            folder=folder,
            spec=spec,
            step=max((commit.step for commit in view.recovery.commits), default=0),
            warn=warn,
        )
        self._warn = warn
        self._sinks = [SinkThread(name, open, warn) for name, open in opening.items()]
        self._metrics = RayMetrics(job)

    def fold(self, record: Record) -> None:
        """Pass one event on; returns at once."""
        for sink in self._sinks:
            sink.accept(record)

    async def keep_recording(self, view: JobView) -> None:
        """Record the metrics of `view` until cancelled, or until that fails: it costs a warning, not the job."""
        try:
            while True:
                await self._record(view)
                await asyncio.sleep(METRICS_S)
        except Exception as error:
            self._warn(f"Ray gets no more of this job's metrics: {type(error).__name__}: {error}")

    async def close(self, view: JobView) -> None:
        """Let the sinks take what waits, and record the last metrics."""
        await asyncio.gather(*(asyncio.to_thread(sink.close, CLOSE_S) for sink in self._sinks))
        with suppress(Exception):  # the log is complete: nobody is left to warn
            await self._record(view)

    async def _record(self, view: JobView) -> None:
        # The view changes on this loop, so its values are taken here.
        await asyncio.to_thread(self._metrics.record, samples(view))
