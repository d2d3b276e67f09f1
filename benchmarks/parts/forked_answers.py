"""Runs functions in forked processes, side by side, each of which sends one answer through its pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from workers.launch.processes import forkserver


def forked_answers(run: Callable[..., None], calls: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The answers of `run(*arguments, pipe)` in a process for each of `calls`, in their order."""
    context: Any = forkserver()
    pipes, processes = [], []
    for arguments in calls:
        here, there = context.Pipe()
        process = context.Process(target=run, args=(*arguments, there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return found
