"""Traces that Perfetto can open."""

import json
from dataclasses import dataclass
from typing import Any

from small_profile import layer, plan, profile

from orchestrator.pictures.perfetto import action_lanes, chrome_trace, link_lanes, memory_counters
from planner.profile import Link
from planner.schedule.registry import build
from planner.simulation.predict import predict


@dataclass(frozen=True)
class Measured:
    action: str
    start_s: float
    end_s: float


def events(text: str, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == phase]


def test_a_simulated_and_a_measured_step_in_one_trace():
    two = profile(layer(), layer(), link=Link(latency_s=0.25, bytes_per_s=8.0))
    simulation = predict(two, plan(1, 1, microbatches=1), build("1f1b", 2, 1)).simulation
    measured = ((Measured("0F0", 0.5, 1.5),), (Measured("1F0", 2.0, 2.5), Measured("1B0", 2.5, 9.0)))
    text = chrome_trace(
        [
            *action_lanes("predicted", simulation.timeline, frozen=[(1, 0, 0.75)]),
            *link_lanes("predicted", simulation),
            *action_lanes("measured", measured),
        ]
    )
    names = [(e["name"], e["pid"], e["args"]["name"]) for e in events(text, "M") if "name" in e["args"]]
    assert names == [
        ("process_name", 0, "predicted"),
        ("thread_name", 0, "rank 0"),
        ("thread_name", 0, "rank 1"),
        ("thread_name", 0, "link 0 to 1"),
        ("thread_name", 0, "link 1 to 0"),
        ("process_name", 1, "measured"),
        ("thread_name", 1, "rank 0"),
        ("thread_name", 1, "rank 1"),
    ]
    spans = [(e["pid"], e["name"], e["cat"], e["ts"], e["dur"]) for e in events(text, "X")]
    assert spans == [
        (0, "0F0", "forward", 0, 1e6),
        (0, "0B0", "backward", 9.25e6, 6e6),
        (0, "1F0", "forward", 1.75e6, 1e6),
        (0, "1B0", "backward", 2.75e6, 6e6),
        (0, "output of 0F0", "message", 1e6, 0.5e6),
        (0, "output of 1B0", "message", 8.75e6, 0.25e6),
        (1, "0F0", "forward", 0.5e6, 1e6),
        (1, "1F0", "forward", 2e6, 0.5e6),
        (1, "1B0", "backward", 2.5e6, 6.5e6),
    ]
    arguments = {(e["pid"], e["name"]): e["args"] for e in events(text, "X")}
    assert arguments[0, "1B0"] == {"stage": 1, "microbatch": 0, "planned_freeze_ratio": 0.75}
    assert arguments[0, "1F0"] == {"stage": 1, "microbatch": 0}
    assert arguments[0, "0B0"] == {"stage": 0, "microbatch": 0}
    assert arguments[0, "output of 1B0"] == {"arrival_s": 9.25}


def test_every_family_gives_a_trace_whose_spans_lie_in_the_step_and_do_not_overlap():
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv"):
        schedule = build(name, 3, 6)
        cut = plan(*[1] * schedule.stages, schedule=name, chunks=schedule.stages // 3, microbatches=6)
        model = profile(*[layer()] * schedule.stages, ranks=3, link=Link(latency_s=0.125, bytes_per_s=16.0))
        simulation = predict(model, cut, schedule).simulation
        lanes = [*action_lanes("p", simulation.timeline), *link_lanes("p", simulation)]
        text = chrome_trace(lanes)
        assert len(events(text, "X")) == sum(len(lane.spans) for lane in lanes)
        ends: dict[int, float] = {}
        for event in events(text, "X"):
            assert ends.get(event["tid"], 0) <= event["ts"]
            ends[event["tid"]] = event["ts"] + event["dur"]
            assert event["dur"] >= 0
        assert max(ends.values()) == simulation.makespan_s * 1e6
        messages = [event for event in events(text, "X") if event["cat"] == "message"]
        assert len(messages) == len(simulation.transfers) > 0


def test_memory_is_counted_per_rank():
    two = profile(layer(), layer())
    foreseen = predict(two, plan(1, 1, microbatches=1), build("1f1b", 2, 1))
    text = chrome_trace(
        action_lanes("predicted", foreseen.simulation.timeline),
        memory_counters("predicted", foreseen.memory_over_time()),
    )
    told = [(e["name"], e["pid"], e["ts"] / 1e6, e["args"]) for e in events(text, "C")]
    fixed = {"weights": 40, "optimizer": 80, "gradients": 30}

    def at(time_s: float, **sizes: int) -> tuple[str, int, float, dict[str, int]]:
        return ("rank 0 memory", 0, time_s, {**fixed, "activations": 0, "other": 0, **sizes})

    # 0F0 0-1, 1F0 1-2, 1B0 2-8, 0B0 8-14; in the backward, the received gradient takes 2 bytes.
    assert [counted for counted in told if counted[0] == "rank 0 memory"] == [
        at(0, activations=100),
        at(8, activations=100, other=2),
        at(14),
    ]
    assert [counted for counted in told if counted[0] == "rank 0 memory, all"] == [
        ("rank 0 memory, all", 0, 0, {"bytes": 250}),
        ("rank 0 memory, all", 0, 8, {"bytes": 252}),
        ("rank 0 memory, all", 0, 14, {"bytes": 150}),
    ]
    for rank, peak in enumerate(foreseen.memory.peak_bytes):
        whole = [parts["bytes"] for name, _, _, parts in told if name == f"rank {rank} memory, all"]
        assert max(whole) == peak
