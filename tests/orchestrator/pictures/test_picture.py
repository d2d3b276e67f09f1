import re
from dataclasses import dataclass, fields
from xml.etree import ElementTree

import pytest
from rich.text import Text
from small_profile import layer, plan, profile

from orchestrator.pictures.memory_use import bytes_text
from orchestrator.pictures.spans import seconds_text
from orchestrator.pictures.timeline_svg import Step, picture, svg
from orchestrator.pictures.timeline_text import legend, memory_peaks, terminal
from planner.schedule.passes import add_recompute
from planner.schedule.registry import build
from planner.simulation.memory import MemoryParts, OverTime
from planner.simulation.predict import predict
from planner.simulation.simulate import Costs, simulate

SVG = "{http://www.w3.org/2000/svg}"
UNIT = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)


@dataclass(frozen=True)
class Measured:
    """A span as ranks report it, with the action as a token."""

    action: str
    start_s: float
    end_s: float


MEASURED = [
    [Measured("0F0", 0.0, 0.010), Measured("0B0", 0.040, 0.060)],
    [Measured("1F0", 0.012, 0.022), Measured("1B0", 0.022, 0.038)],
]


def boxes(picture: str) -> list[tuple[str, float, float]]:
    """(tooltip, x, width) of every action's box."""
    root = ElementTree.fromstring(picture)
    return [
        (title.text or "", float(box.get("x", "")), float(box.get("width", "")))
        for box in root.iter(f"{SVG}rect")
        if (title := box.find(f"{SVG}title")) is not None
    ]


def test_svg_has_a_box_per_action_at_its_time():
    simulation = simulate(build("1f1b", 2, 2), UNIT)
    found = boxes(svg(simulation.timeline, "1f1b"))
    assert [tooltip for tooltip, _, _ in found] == [
        "0F0: 0 to 1 s",
        "0F1: 1 to 2 s",
        "0B0: 4 to 6 s",
        "0B1: 7 to 9 s",
        "1F0: 1 to 2 s",
        "1B0: 2 to 4 s",
        "1F1: 4 to 5 s",
        "1B1: 5 to 7 s",
    ]
    scale = found[1][1] - found[0][1]
    for (_, x, width), start in zip(found, [0, 1, 4, 7, 1, 2, 4, 5], strict=True):
        assert x == pytest.approx(found[0][1] + start * scale, abs=0.02)
        assert 0 < width < 2 * scale


def test_svg_shows_tokens_ranks_kinds_bubbles_and_the_unit():
    texts = [
        element.text
        for element in ElementTree.fromstring(
            svg(simulate(add_recompute(build("zb-h1", 2, 2), {0}), UNIT).timeline, "a < b & c")
        ).iter(f"{SVG}text")
    ]
    for expected in ("rank 0", "rank 1", "0F0", "0R1", "1W1", "F forward", "W weight gradient", "bubble"):
        assert expected in texts
    assert "R recompute" in texts
    assert "B backward" not in texts
    assert "time, s" in texts
    assert "a < b & c" in texts


def test_measured_and_simulated_timelines_draw_alike():
    simulation = simulate(build("zbv", 3, 6), UNIT)
    measured = [
        [Measured(str(span.action), span.start_s, span.end_s) for span in spans]
        for spans in simulation.timeline
    ]
    assert svg(measured) == svg(simulation.timeline)
    assert terminal(measured, 80) == terminal(simulation.timeline, 80)


def test_a_measured_step_in_its_own_unit_with_its_commit():
    picture = svg(MEASURED, "step 7", end_s=0.08)
    assert boxes(picture)[0][0] == "0F0: 0 to 10 ms"
    assert "time, ms" in picture
    assert ">80<" in picture


def test_svg_is_self_contained():
    picture = svg(MEASURED)
    assert "href" not in picture
    assert "<script" not in picture
    assert picture.count("http") == 1


def test_tokens_are_left_out_where_they_do_not_fit():
    tiny = [[Measured("0F0", 0.0, 1.0), Measured("0B0", 1.0, 1000.0)]]
    tokens = [text.text for text in ElementTree.fromstring(svg(tiny)).iter(f"{SVG}text")]
    assert "0B0" in tokens
    assert "0F0" not in tokens


def test_terminal_text():
    timeline = simulate(build("1f1b", 2, 2), UNIT).timeline
    assert terminal(timeline, 43, markup=False) == (
        "rank 0 0F0 0F1 ········0B0     ····0B1     \n"
        "rank 1 ····1F0 1B0     1F1 1B1     ········\n"
        "       0                                9 s"
    )


def test_terminal_text_shortens_tokens_to_what_fits():
    timeline = simulate(build("1f1b", 2, 2), UNIT).timeline
    assert terminal(timeline, 34, markup=False).splitlines()[:2] == [
        "rank 0 F0 F1 ······0B0   ···0B1   ",
        "rank 1 ···F0 1B0   F1 1B1   ······",
    ]
    assert terminal(timeline, 16, markup=False).splitlines()[0] == "rank 0 FF··B0 ·B "


def test_terminal_markup_is_rich_and_changes_no_character():
    timeline = simulate(build("zb-h1", 3, 5), UNIT).timeline
    assert Text.from_markup(terminal(timeline, 90)).plain == terminal(timeline, 90, markup=False)
    assert Text.from_markup(legend(timeline)).plain == legend(timeline, markup=False)
    assert legend(timeline, markup=False) == (
        " F  forward   I  input gradient   W  weight gradient  · bubble"
    )


@pytest.mark.parametrize("timeline", [[], [[]], [[], []], [[Measured("0F0", 0.0, 0.0)]]])
def test_nothing_to_draw_is_drawn(timeline: list[list[Measured]]):
    assert ElementTree.fromstring(svg(timeline)).tag == f"{SVG}svg"
    assert len(terminal(timeline, 40).splitlines()) == len(timeline) + 1


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (33, "33 s"),
        (12345.6, "12346 s"),
        (1.2345678, "1.235 s"),
        (0.0123, "12.3 ms"),
        (5e-6, "5 µs"),
    ],
)
def test_seconds_for_people(seconds: float, expected: str):
    assert seconds_text(seconds) == expected


def test_seconds_in_the_unit_of_a_scale():
    assert seconds_text(0.0005, scale_s=0.02) == "0.5 ms"


def bubbles(picture: str) -> list[tuple[float, float]]:
    """(y, width) of every lane."""
    root = ElementTree.fromstring(picture)
    return [
        (float(box.get("y", "")), float(box.get("width", "")))
        for box in root.iter(f"{SVG}rect")
        if box.get("class") == "bubble" and float(box.get("width", "")) > 12
    ]


def test_a_backward_shows_its_frozen_share_and_a_forward_none():
    timeline = simulate(build("1f1b", 2, 2), UNIT).timeline
    picture = svg(timeline, frozen=[(0, 0, 0.25), (1, 1, 1.0)])
    root = ElementTree.fromstring(picture)
    pale = [float(box.get("height", "")) for box in root.iter(f"{SVG}rect") if box.get("class") == "frozen"]
    # The last box is the legend's.
    assert sorted(pale) == [6.0, 7.0, 24.0]
    tooltips = [tooltip for tooltip, _, _ in boxes(picture)]
    assert "0B0: 4 to 6 s, 25 % frozen" in tooltips
    assert "1B1: 5 to 7 s, 100 % frozen" in tooltips
    assert "0F0: 0 to 1 s" in tooltips
    assert "pale: frozen share" in picture
    assert "pale: frozen share" not in svg(timeline)


def test_two_timelines_share_one_axis():
    slower = simulate(build("1f1b", 2, 2), Costs.uniform(forward_s=2, input_grad_s=2, weight_grad_s=2))
    faster = simulate(build("1f1b", 2, 2), UNIT)
    steps = [Step("predicted", faster.timeline, None), Step("measured", slower.timeline, None)]
    drawn = picture(steps, "step 7", width=900).svg()
    (_, one), (_, two), (_, three), (_, four) = bubbles(drawn)
    assert (one, two, three, four) == (450, 450, 900, 900)
    starts = {(tooltip.split(":")[0], index // 8): x for index, (tooltip, x, _) in enumerate(boxes(drawn))}
    assert starts["0F1", 0] - 60 == pytest.approx(50)
    assert starts["0F1", 1] - 60 == pytest.approx(100)
    texts = [text.text for text in ElementTree.fromstring(drawn).iter(f"{SVG}text")]
    assert "predicted, 9 s" in texts
    assert "measured, 18 s" in texts
    assert texts.count("rank 0") == 2
    assert texts.count("0") == 1


def test_each_of_two_timelines_has_its_own_frozen_shares_and_end():
    timeline = simulate(build("1f1b", 2, 1), UNIT).timeline
    steps = [
        Step("predicted", timeline, 7.0, [(0, 0, 0.5)]),
        Step("measured", timeline, None, [(0, 0, 0.75)]),
    ]
    drawn = picture(steps, "step 7").svg()
    tooltips = [tooltip for tooltip, _, _ in boxes(drawn) if "frozen" in tooltip]
    assert tooltips == ["0B0: 4 to 6 s, 50 % frozen", "0B0: 4 to 6 s, 75 % frozen"]
    assert "predicted, 7 s" in drawn
    assert "measured, 6 s" in drawn


def test_terminal_text_shades_what_is_frozen():
    timeline = simulate(build("1f1b", 2, 2), UNIT).timeline
    frozen = [(0, 0, 0.2), (0, 1, 0.5), (1, 0, 1.0)]
    assert terminal(timeline, 43, markup=False, frozen=frozen).splitlines()[:2] == [
        "rank 0 0F0 0F1 ········0B0░░░░░····0B1▒▒▒▒▒",
        "rank 1 ····1F0 1B0▓▓▓▓▓1F1 1B1     ········",
    ]
    assert legend(timeline, markup=False, frozen=True).endswith("  ░▒▓ frozen to one, two, three thirds")


def parts(**sizes: int) -> MemoryParts:
    nothing = {field.name: 0 for field in fields(MemoryParts)}
    return MemoryParts(**{**nothing, **sizes})


MEMORY: tuple[OverTime, ...] = (
    (
        (0.0, parts(weights=100)),
        (1.0, parts(weights=100, activations=90, working=10)),
        (3.0, parts(weights=100, gradients=50)),
    ),
    ((0.0, parts(weights=60)), (2.0, parts(weights=60, activations=40))),
)


def uses(picture: str) -> list[tuple[str, str]]:
    """(tooltip, outline) of each use of memory."""
    return [
        (path.findtext(f"{SVG}title") or "", path.get("d", ""))
        for path in ElementTree.fromstring(picture).iter(f"{SVG}path")
    ]


def test_each_rank_has_its_memory_below_it():
    timeline = simulate(build("1f1b", 2, 2), UNIT).timeline
    picture = svg(timeline, width=900, memory=MEMORY)
    # 200 bytes take 36 pixels and a second takes 100. Each use reaches down to the bottom; the next one
    # covers it.
    assert uses(picture) == [
        ("rank 0, other: at most 10 B", "M60.00 137V119.00H160.00V101.00H360.00V110.00H960.00V137Z"),
        ("rank 0, activations: at most 90 B", "M60.00 137V119.00H160.00V102.80H360.00V110.00H960.00V137Z"),
        ("rank 0, gradients: at most 50 B", "M60.00 137V119.00H360.00V110.00H960.00V137Z"),
        ("rank 0, weights: at most 100 B", "M60.00 137V119.00H960.00V137Z"),
        ("rank 1, activations: at most 40 B", "M60.00 212V201.20H260.00V194.00H960.00V212Z"),
        ("rank 1, weights: at most 60 B", "M60.00 212V201.20H960.00V212Z"),
    ]
    texts = [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    for expected in ("memory", "200 B", "100 B", "weights", "activations", "gradients", "other"):
        assert expected in texts
    assert "optimizer" not in texts
    # Lanes move to make room for memory, and boxes stay in their lanes.
    assert [y for y, _ in bubbles(picture)] == [74, 149]
    assert {title: x for title, x, _ in boxes(picture)}["1F0: 1 to 2 s"] == 160


def test_the_highest_of_a_rank_s_memory_is_its_peak():
    two = profile(layer(activation_bytes=3000), layer(weight_grad_hold_bytes=700))
    foreseen = predict(two, plan(1, 1, schedule="zb-h1"), build("zb-h1", 2, 2))
    picture = svg(foreseen.simulation.timeline, memory=foreseen.memory_over_time())
    most = foreseen.peak_memory_bytes
    for rank, peak in enumerate(foreseen.memory.peak_bytes):
        outlines = [outline for title, outline in uses(picture) if title.startswith(f"rank {rank},")]
        heights = [float(y) for outline in outlines for y in re.findall(r"V([\d.]+)", outline)]
        bottom = float(outlines[0].split()[1].partition("V")[0])
        assert (bottom - min(heights)) * most / 36 == pytest.approx(peak, abs=most * 0.01 / 36)
        assert f">{bytes_text(peak)}<" in picture


def test_a_picture_without_memory_has_no_room_for_it():
    picture = svg(simulate(build("1f1b", 2, 2), UNIT).timeline)
    assert not uses(picture)
    assert "memory" not in picture
    assert [y for y, _ in bubbles(picture)] == [54, 84]


def test_terminal_text_tells_each_rank_s_peak_and_what_it_is_for():
    peaks = [parts(weights=1000, optimizer=2000, activations=1240, working=7, messages=5), parts(weights=10)]
    assert memory_peaks(peaks).splitlines() == [
        "rank 0 memory peak 4.25 kB: optimizer 2.00 kB, activations 1.24 kB, weights 1.00 kB, other 12 B",
        "rank 1 memory peak 10 B: weights 10 B",
    ]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (124_000, "124 kB"),
        (999_600, "1.00 MB"),
        (12_340_000_000, "12.3 GB"),
    ],
)
def test_bytes_for_people(count: int, expected: str):
    assert bytes_text(count) == expected


def test_the_critical_path_is_underlined_and_told() -> None:
    timeline = simulate(build("1f1b", 2, 2), UNIT).timeline
    drawn = picture([Step("", timeline, None, critical=[(0, 0), (1, 1)])], "").svg()
    root = ElementTree.fromstring(drawn)
    lines = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "critical"]
    _, *under = lines  # the first is the legend's
    found = {tooltip: (x, width) for tooltip, x, width in boxes(drawn)}
    marked = [found["0F0: 0 to 1 s, on the critical path"], found["1B0: 2 to 4 s, on the critical path"]]
    assert [(float(box.get("x", "")), float(box.get("width", ""))) for box in under] == marked
    assert "underlined: critical path" in drawn
    assert "critical path" not in svg(timeline)


def test_terminal_text_underlines_the_critical_path() -> None:
    timeline = simulate(build("1f1b", 2, 2), UNIT).timeline
    assert terminal(timeline, 43, markup=False, critical=[(0, 0), (1, 1), (1, 3)]) == (
        "rank 0 0F0 0F1 ········0B0     ····0B1     \n"
        "       ▔▔▔▔\n"
        "rank 1 ····1F0 1B0     1F1 1B1     ········\n"
        "               ▔▔▔▔▔▔▔▔    ▔▔▔▔▔▔▔▔\n"
        "       0                                9 s"
    )
    assert legend(timeline, markup=False, critical=True).endswith("· bubble  ▔▔▔ critical path")
