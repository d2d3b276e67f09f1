"""A rank dies while a large message of its is on the way, as most are in real jobs: nobody waits for the rest of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from process_hosts import ElasticJob, assert_gone
from ray_jobs import resolved
from tiny_jobs import write_text
from torch import Tensor, nn

from orchestrator.events import types as events
from orchestrator.lifecycle.states import Finished
from orchestrator.prepare.resolve import Resolved
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from workers.config import DataConfig, ElasticConfig, ModelConfig
from workers.launch.ranks import Job, run_threads
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.transport.channel import Stream
from workers.transport.process_group import ProcessGroupChannel

WIDTH = 2_000_000
SAMPLES = 8
"""Of a microbatch, whose message has 64 MB."""
STEPS = 5
STRUCK = 6
"""Which of its messages the rank is killed in; it sends two in each direction at every step."""
BEGUN_BYTES = 100_000
TIMEOUT_S = 60.0


class Spread(nn.Module):
    """int64[B, T] -> float32[B, WIDTH]"""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.float().mean(-1, keepdim=True) / 256 * self.scale


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.mean(-1) - targets.float().mean(-1) / 256).square().mean()


def model() -> ModelDefinition:
    kinds: Sequence[type[nn.Module]] = (Spread, Scale, Scale)
    return ModelDefinition(
        tuple(LayerBuilder(f"l{index}", kind) for index, kind in enumerate(kinds)), distance
    )


def dies_sending(rank: int) -> None:
    """Rank 1 dies once the network has taken a part of one message."""
    if rank != 1:
        return
    send, sent = ProcessGroupChannel.send, 0

    def torn(self: ProcessGroupChannel, stream: Stream, tensors: Sequence[Tensor]) -> None:
        nonlocal sent
        send(self, stream, tensors)
        sent += tensors[0].numel() == SAMPLES * WIDTH
        deadline_s = time.monotonic() + TIMEOUT_S
        while sent == STRUCK and time.monotonic() < deadline_s:
            self.sending()
            if max(queue.unacknowledged for queue in self._queues._queues) > BEGUN_BYTES:
                os.kill(os.getpid(), signal.SIGKILL)

    ProcessGroupChannel.send = torn


def job(folder: Path) -> Resolved:
    return resolved(
        Spec(
            job=JobConfig(name="wide", steps=STEPS, sample_tokens=0, output=str(folder / "wide")),
            model=ModelConfig(factory="test_torn_messages:model", context=4),
            data=DataConfig(source="text", path=str(write_text(folder))),
            pipeline=PipelineConfig(ranks=3, microbatches=2, microbatch_size=SAMPLES),
            elastic=ElasticConfig(redundancy="peer", grow=False),
            cluster=ClusterConfig(address="auto", device="cpu"),
        )
    )


def test_survivors_go_on_at_once(tmp_path: Path) -> None:
    torn = job(tmp_path)
    calm = run_threads(Job(torn.config, torn.plan, torn.schedule))
    ran = ElasticJob(torn, rig=dies_sending, timeout_s=TIMEOUT_S).run()
    assert isinstance(ran.state, Finished), ran.state
    failed = ran.of(events.RankFailed)
    assert [each.rank for each in failed] == [1], failed
    (regrouped,) = ran.of(events.Regrouped)
    assert regrouped.lost == (1,)
    assert regrouped.detect_s < TIMEOUT_S / 4
    assert ran.steps == list(range(1, STEPS + 1))
    assert ran.state_sha256 == calm.state_sha256
    assert_gone(ran.pids)
