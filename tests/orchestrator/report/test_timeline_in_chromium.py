"""Timelines in a browser: thousands of actions draw at once, and keys, buttons, wheel and drag zoom into them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chromium import needs_chromium, open_page
from report_page import Page, tokens

from orchestrator.analysis.step_causes import simulated_causes
from orchestrator.pictures.timeline_svg import Step
from orchestrator.pictures.timeline_view import TimelineView
from orchestrator.report.step.idle_table import idle_table
from orchestrator.report.step.picture_page import Drawn, picture_page
from planner.schedule.registry import build
from planner.simulation.simulate import Costs, simulate

COSTS = Costs.uniform(forward_s=0.004, input_grad_s=0.005, weight_grad_s=0.003, communication_s=0.0004)
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy".*?>')


def page(schedule: str, ranks: int, microbatches: int) -> str:
    """A page of one simulated step, measured and predicted alike."""
    simulation = simulate(build(schedule, ranks, microbatches), COSTS)
    found = simulated_causes(simulation)
    critical = found.critical.spans
    steps = [Step(name, simulation.timeline, None, critical=critical) for name in ("measured", "predicted")]
    drawn = Drawn(TimelineView(schedule, steps), idle_table(found, "measured"))
    return picture_page("step", "Step 1", "", [drawn])


def driven(html: str, script: str, folder: Path, *options: str, real_time: bool = False) -> Any:
    """What `script` returns, run in the page after the page's own."""
    after = f"""<pre id="answer"></pre><script>
const figure = document.querySelector(".timeline-view"), canvas = figure.querySelector("canvas");
const answer = () => {{ {script} }};
document.getElementById("answer").textContent = JSON.stringify(answer());
</script></body>"""
    (folder / "step.html").write_text(POLICY.sub("", html).replace("</body>", after), encoding="utf-8")
    opened = open_page(folder / "step.html", folder / "profile", *options, real_time=real_time)
    assert opened.console == []
    found = re.search(r'<pre id="answer">(.*?)</pre>', opened.dom, re.DOTALL)
    assert found is not None
    return json.loads(found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))


@needs_chromium
def test_five_thousand_actions_are_drawn_from_a_small_page(tmp_path: Path) -> None:
    html = page("zb-h1", 8, 105)
    (timeline,) = Page(html).timelines
    assert sum(len(tokens(lane)) for group in timeline["groups"] for lane in group["lanes"]) > 5_000
    assert len(html) < 150_000
    assert driven(html, "return freshetTimelines.of(figure).lanes.length", tmp_path) == 16


KEYS = """
const range = () => [view.from, view.to].map(Math.round);
const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const at = (type, x, y, more) => {
  const event = new (type === "wheel" ? WheelEvent : PointerEvent)(type, {
    clientX: canvas.getBoundingClientRect().left + x, clientY: canvas.getBoundingClientRect().top + y,
    bubbles: true, cancelable: true, pointerId: 1, pointerType: "mouse", ...more });
  return canvas.dispatchEvent(event);
};
canvas.setPointerCapture = () => {};
const view = freshetTimelines.of(figure);
const told = () => figure.querySelector("output").textContent;
"""


@needs_chromium
def test_keys_buttons_wheel_and_drag_zoom_and_actions_are_read_out(tmp_path: Path) -> None:
    seen = driven(
        page("1f1b", 4, 8),
        KEYS
        + """
        const seen = { whole: range() };
        press("+"); seen.in = range();
        press("ArrowRight"); seen.right = range();
        press("ArrowLeft"); press("ArrowUp"); seen.deeper = range();
        press("-"); press("ArrowDown"); seen.out = range();
        figure.querySelector("[data-act=in]").click(); seen.button = range();
        press("Home"); seen.home = range();
        seen.scrolls = at("wheel", 300, 40, { deltaY: -200 }); seen.unfocused = range();
        canvas.focus();
        seen.held = at("wheel", 300, 40, { deltaY: -200 }); seen.wheel = range();
        press("0");
        at("pointerdown", view.x(25000), 40); at("pointermove", view.x(30000), 40);
        at("pointerup", view.x(50000), 40); seen.dragged = range();
        press("0"); press("n"); seen.first = told();
        press("n"); seen.second = told();
        press("PageDown"); seen.below = told();
        at("pointermove", view.x(view.lanes[3].starts[0]) + 1, view.lanes[3].top + 5); seen.pointed = told();
        at("pointermove", view.x(1), view.lanes[3].top + 5); seen.bubble = told();
        return seen;
        """,
        tmp_path,
    )
    everything = [0, 100_000]
    assert seen["whole"] == seen["out"] == seen["home"] == seen["unfocused"] == everything
    assert seen["in"] == seen["button"] == [25_000, 75_000]
    assert seen["right"] == [37_500, 87_500]
    assert seen["deeper"] == [37_500, 62_500]
    assert (seen["scrolls"], seen["held"]) == (True, False)
    assert seen["wheel"][1] - seen["wheel"][0] == pytest.approx(50_000, abs=1)
    assert seen["dragged"] == pytest.approx([25_000, 50_000], abs=200)
    assert seen["first"] == (
        "measured, rank 0 · 0F0: forward of microbatch 0 on stage 0 · 0 to 4 ms, takes 4 ms · on the critical path"
    )
    assert seen["second"].startswith("measured, rank 0 · 0F1: forward of microbatch 1")
    assert seen["below"].startswith("measured, rank 1 · 1F0: ")
    assert seen["pointed"].startswith(
        "measured, rank 3 · 3F0: forward of microbatch 0 on stage 3 · 13.2 to 17.2 ms"
    )
    assert seen["bubble"] == ""


@needs_chromium
def test_a_step_without_actions_draws_its_lanes(tmp_path: Path) -> None:
    html = picture_page("step", "Step 1", "", [Drawn(TimelineView("", [Step("", [[], []], None)]), None)])
    seen = driven(
        html,
        KEYS
        + 'for (const key of ["+", "n", "PageDown", "p"]) press(key); return [view.lanes.length, told()];',
        tmp_path,
    )
    assert seen == [2, ""]


@needs_chromium
def test_on_a_phone_in_the_dark_everything_stays_on_the_page(tmp_path: Path) -> None:
    dark = "--blink-settings=preferredColorScheme=0"
    seen = driven(
        page("1f1b", 4, 8),
        """
        const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink");
        const view = freshetTimelines.of(figure);
        const left = view.x(0) + 4, top = view.lanes[0].top + 24;
        const { data } = canvas.getContext("2d").getImageData(left, top, 1, 9);
        const pixel = (y) => [...data.slice(4 * y, 4 * y + 3)];
        return {
          ink, dark: matchMedia("(prefers-color-scheme: dark)").matches,
          wide: document.documentElement.scrollWidth, window: innerWidth,
          canvas: canvas.getBoundingClientRect().width,
          underline: pixel(3), below: pixel(7),
          label: canvas.getAttribute("aria-label"), focus: canvas.tabIndex,
          named: [...figure.querySelectorAll("button")].every((button) => button.getAttribute("aria-label")),
        };
        """,
        tmp_path,
        "--window-size=500,900",
        dark,
    )
    assert seen["dark"]
    assert seen["wide"] <= seen["window"]
    assert 200 < seen["canvas"] < seen["window"]
    # The underline has the colour of text, and ends before the next lane.
    assert "#{:02x}{:02x}{:02x}".format(*seen["underline"]) == seen["ink"]
    assert seen["below"] != seen["underline"]
    assert seen["label"].startswith("1f1b. measured: 64 actions on 4 ranks in ")
    assert (seen["focus"], seen["named"]) == (0, True)
