"""The pages as HTML: what they show of past runs and live jobs, who sees controls, and what a browser has to load."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from httpx import Response
from markupsafe import escape
from pace import patient
from page_runs import HOSTILE, moving, other_plan, page_settings, profile, training
from report_page import Page
from serving import live_job, settings_in, show, token, write_run
from synthetic_run import freezing_records, plan

from dashboard.app import create_app
from dashboard.pages.controls import CONTROLS, Expected, expectation, simulates
from dashboard.pages.sections import BY_NAME, SECTIONS, render
from dashboard.pages.shown import Shown
from dashboard.pages.sparkline import sparkline
from dashboard.pages.what_if_page import WhatIfForm, ways
from dashboard.service.access import Role
from dashboard.service.problems import ProblemAnswer
from dashboard.service.settings import ServiceSettings
from orchestrator.analysis.what_if import what_if
from orchestrator.client.errors import ControllerSilent, JobError, NoController, PlanChanged, Refused
from orchestrator.client.job_client import JobClient
from orchestrator.client.jobs import Command
from orchestrator.commands.apply import Apply
from orchestrator.commands.command import JobCommand
from orchestrator.commands.drain import Drain
from orchestrator.commands.freeze import Freeze
from orchestrator.commands.move import Move
from orchestrator.commands.pause import Pause
from orchestrator.commands.scale import Scale
from orchestrator.commands.undrain import Undrain
from orchestrator.events.types import (
    KINDS,
    Adapted,
    Commanded,
    Finished,
    Issued,
    Record,
    Sampled,
    SpeedsChanged,
    Surroundings,
)
from orchestrator.history.job_view import JobView

HEAVIEST = 150_000
"""Most bytes of a page, unpacked, without the chart library."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServiceSettings:
    return page_settings(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def client(settings: ServiceSettings) -> Iterator[TestClient]:
    headers = {"Authorization": f"Bearer {token(settings)}"}
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8270", headers=headers) as client:
        yield client


def shown(view: JobView, *, live: bool = True) -> Shown:
    return Shown(
        view=view, name="gpt", base="/jobs/gpt", live=live, lost=False, trouble="", folder=view.folder
    )


def section(name: str, view: JobView) -> Page:
    return Page(str(render(BY_NAME[name], shown(view))))


def test_a_past_run_shows_every_section_and_no_control(client: TestClient) -> None:
    answer = client.get("/runs/frozen")
    page = Page(answer.text)
    assert answer.status_code == 200
    headings = re.findall(r"<h2>([^<]*)", answer.text)
    assert headings == [
        "Notes",
        "Layers on ranks and nodes",
        "Training",
        "Freezing",
        "Decisions",
        "Checkpoints",
        "What runs",
        "Sampled text",
    ]
    assert {"Loss", "Gradient norm", "Throughput", "Step time", "Freeze ratio"} <= set(page.charts)
    assert [series["name"] for series in page.charts["Step time"]["series"]] == ["measured", "predicted"]
    assert "controls/" not in answer.text
    assert not any(link.get("data-stream") for _, link in page.elements)
    # What is large comes after the page.
    late = [each["data-from"] for each in page.all("section") if "data-late" in each]
    assert late == [f"/runs/frozen/parts/{name}" for name in ("timeline", "memory", "output")]
    # The line at the top leads to every part that has something to show, or may have.
    contents = [each for each in page.all("a") if each["href"].startswith("#") and "hidden" not in each]
    ids = {each["id"] for each in page.all("section") if "id" in each}
    assert {each["href"][1:] for each in contents} - {"main"} <= ids
    assert "#checkpoints" in {each["href"] for each in contents}
    assert "#recovery" not in {each["href"] for each in contents}


def test_what_comes_after_the_page_is_the_timeline_and_the_memory(client: TestClient) -> None:
    timeline = client.get("/runs/frozen/parts/timeline").text
    assert "Step 200 measured and predicted" in timeline
    assert "Idle time by cause" in timeline
    memory = Page(client.get("/runs/gpt/parts/memory").text)
    meters = memory.all("meter")
    assert [meter["aria-label"] for meter in meters] == [f"Memory of rank {rank}" for rank in range(4)]
    assert {meter["max"] for meter in meters} == {"12000000"}
    assert client.get("/runs/gpt/parts/nothing").status_code == 404


def test_pages_are_light_and_refer_to_nothing_but_this_service(client: TestClient) -> None:
    client.get("/runs/long")  # reads the log
    began_s = time.perf_counter()
    answer = client.get("/runs/long")
    assert time.perf_counter() - began_s < patient(1.0)
    page = Page(answer.text)
    files = [each["src"] for each in page.all("script") if "src" in each]
    files += [each["href"] for each in page.all("link") if each["rel"] == "stylesheet"]
    assert files
    assert all(name.startswith("/static/") for name in files)
    loaded = {name: client.get(name) for name in files}
    assert {each.status_code for each in loaded.values()} == {200}
    own = [len(each.content) for name, each in loaded.items() if "chart_library" not in name]
    late = [each["data-from"] for each in page.all("section") if "data-late" in each]
    rest = [len(client.get(name).content) for name in late]
    assert len(answer.content) + sum(own) + sum(rest) < HEAVIEST
    # The policy forbids styles and scripts in the page.
    assert not page.scripts
    assert not page.styles
    assert not any("style" in attributes for _, attributes in page.elements)
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


def test_the_timeline_of_a_kept_step_has_an_address_and_a_trace(client: TestClient) -> None:
    text = client.get("/runs/frozen/steps", params={"step": 25}).text
    page = Page(text)
    assert "Step 25 as measured" in text
    assert {each["href"] for each in page.all("a")} >= {"?step=24", "?step=26", "?step=25"}
    (trace,) = (each["href"] for each in page.all("a") if "download" in each)
    assert client.get(trace).json()["traceEvents"]
    refused = client.get("/runs/frozen/steps", params={"step": 3})
    assert refused.status_code == 404
    assert "no timeline of step 3 is kept" in Page(refused.text).text


def test_runs_are_listed_with_those_that_cannot_be_read_and_compared(client: TestClient) -> None:
    text = Page(client.get("/runs").text).text
    assert "half has no event log yet" in text
    compared = client.get("/compare", params={"run": ["gpt", "frozen", "rehearsal"]})
    page = Page(compared.text)
    assert [series["name"] for series in page.charts["Loss"]["series"]] == ["gpt", "frozen", "rehearsal"]
    assert "Rehearsal rehearsal" in page.text
    assert "Effective training time" in page.text
    one = client.get("/compare", params={"run": "gpt"})
    assert one.status_code == 422
    assert "2 to 6 can be compared" in Page(one.text).text
    assert client.get("/compare", params={"run": ["gpt", "no"]}).status_code == 404


def test_what_if_shows_both_steps_and_what_it_takes(client: TestClient) -> None:
    page = client.get("/runs/gpt/what-if", params={"schedule": "zb-h1", "r_max": "0.5", "ranks": ""})
    assert "A running job keeps its schedule." in page.text
    assert "Change what is frozen" in page.text
    best = client.get("/runs/gpt/what-if").text
    assert "Have the ranks take up this cut" in best
    assert "20." in re.findall(r"Expected<small>([^<]*)", best)[0]
    bad = client.get("/runs/gpt/what-if", params={"ranks": 3, "schedule": "interleaved"})
    assert "needs a multiple of the ranks" in Page(bad.text).text
    assert client.get("/runs/gpt/what-if", params={"ranks": "x"}).status_code == 422


def test_errors_are_pages_with_the_way_out(client: TestClient) -> None:
    for path in ("/jobs/nope", "/jobs/nope/controls/pause", "/runs/nope"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert answer.headers["content-type"].startswith("text/html")
    answer = client.get("/cluster")
    assert answer.status_code == 409
    assert "Start it with --address." in Page(answer.text).text


def test_the_start_page_says_how_to_begin(client: TestClient) -> None:
    page = Page(client.get("/").text)
    assert "started without a cluster" in page.text
    (part,) = page.all("section")
    assert client.get(part["data-from"]).status_code == 200


def test_a_login_leads_back_to_the_shared_page(settings: ServiceSettings) -> None:
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8270") as browser:
        browser.follow_redirects = False
        asked = browser.get("/runs/gpt/what-if?ranks=2&cut=best", headers={"Accept": "text/html"})
        assert asked.status_code == 303
        form = Page(browser.get(asked.headers["location"]).text)
        (wanted,) = (each["value"] for each in form.all("input") if each.get("name") == "next")
        answer = browser.post("/login", data={"token": token(settings, Role.READ), "next": wanted})
        assert answer.headers["location"] == "/runs/gpt/what-if?ranks=2&cut=best"
        assert browser.get(wanted).status_code == 200


def test_a_live_job_s_page_follows_its_events() -> None:
    """Each section names kinds of events that there are."""
    names = {kind for each in SECTIONS for kind in each.kinds}
    assert names <= KINDS.keys()
    page = section("head", training())
    assert "Ranks" in page.text
    assert page.all("progress")[0]["value"] == "40"


def test_layers_on_their_way_are_told_in_words_too() -> None:
    page = section("map", moving())
    assert "plan 1.1; plan 1.2 is on its way, layers 3 move" in " ".join(page.text.split())
    assert "3 → rank 0" in page.text
    assert "3 from rank 1" in page.text


def test_controls_that_were_sent_are_told_in_words_whatever_they_name() -> None:
    moves = Commanded(id="a", name="move", arguments={"layers": "3", "rank": 0, "base": [1, 2]})
    odd = Commanded(id="b", name="drain", arguments={"node": "n", "base": 7})
    told = " ".join(section("commands", training(moves, odd)).text.split())
    assert "move layers 3 rank 0 for plan 1.2" in told
    assert "drain node n base 7" in told


def test_a_job_s_name_is_never_markup() -> None:
    view = training()
    view.job = view.spec["job"]["name"] = HOSTILE
    for each in SECTIONS:
        assert "<script>alert" not in render(each, shown(view))


def test_the_plan_s_changes_are_marked_in_the_curves() -> None:
    page = section("training", moving())
    assert {title: chart["changes"] for title, chart in page.charts.items()} == {
        "Loss": [40],
        "Throughput": [40],
        "Gradient norm": [40],
        "Step time": [40],
    }
    decisions = section("decisions", moving())
    assert decisions.text.index("plan 1.2") < decisions.text.index("plan 1.1")
    assert "layer 3 moves" in decisions.text


KNOWN = SpeedsChanged(
    step=4, slowdowns=((0, 1.0), (1, 2.5)), changes=("rank 1 is slower",), lasting_steps=200, since=0
)
STAYS = Adapted(
    step=5, moves=False, reason="too little", now_s=0.2, then_s=0.2, cost_s=0.1, layers=(3, 2, 2, 3)
)


SAMPLED = Sampled(step=5, ranks=(Surroundings(rank=0, slowdown=1.5, values=(("cpu_others", 0.5),)),))


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("decisions", {"FreezeStarted", "Adapted", "Issued"}),
        ("freezing", {"FreezeStarted", "Issued"}),
        ("speeds", {"SpeedsChanged", "Adapted"}),
        ("surroundings", {"Sampled"}),
    ],
)
def test_an_event_that_changes_a_section_is_one_that_makes_it_old(name: str, needed: set[str]) -> None:
    log = [each for each in freezing_records(steps=60) if not isinstance(each.event, Finished)]
    end_s = log[-1].time_s
    log += [
        Record(time_s=end_s + 1, event=event) for event in (KNOWN, STAYS, SAMPLED, Issued(plan=other_plan()))
    ]
    view, changed = JobView(), set()
    for record in log:
        kind = record.kind
        if kind in (
            "StepReport",
            "TimelineReport",
            "ValidationReport",
            "FreezeReport",
        ):  # all of them would take long
            view.fold(record)
            continue
        before = render(BY_NAME[name], shown(view))
        view.fold(record)
        if render(BY_NAME[name], shown(view)) != before:
            changed.add(kind)
    assert needed <= changed <= {*BY_NAME[name].kinds}


def test_the_speeds_of_ranks_are_shown_with_what_was_decided_on_them() -> None:
    page = section("speeds", training(KNOWN, STAYS))
    assert page.charts
    assert "too little" in page.text
    assert not section("speeds", training()).text


@pytest.mark.parametrize("role", Role)
def test_what_if_is_a_link_away_for_every_reader_and_every_run(settings: ServiceSettings, role: Role) -> None:
    ended = create_app(settings)
    show(ended, live_job())
    headers = {"Authorization": f"Bearer {token(settings, role)}"}
    with TestClient(ended, base_url="http://127.0.0.1:8270", headers=headers) as client:
        for base in ("/runs/gpt", "/jobs/gpt"):
            links = [each["href"] for each in Page(client.get(base).text).all("a")]
            assert links.count(f"{base}/what-if") == 1
            assert f"{base}/what-if" in client.get(f"{base}/parts/head").text
            assert client.get(f"{base}/what-if").status_code == 200


def test_runs_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("old/runs", "new/runs", "one")]
    for folder in folders[:2]:
        write_run(folder / "gpt", freezing_records(steps=5))
    write_run(folders[1] / "other", freezing_records(steps=5))
    write_run(folders[2], freezing_records(steps=5))
    settings = replace(settings_in(tmp_path / "service"), runs=(*folders, folders[0]))
    headers = {"Authorization": f"Bearer {token(settings, Role.READ)}"}
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8270", headers=headers) as client:
        found = {each["run"]: each["folder"] for each in client.get("/api/v1/runs").json()["runs"]}
        assert found == {
            "old~runs~gpt": str(folders[0] / "gpt"),
            "new~runs~gpt": str(folders[1] / "gpt"),
            "other": str(folders[1] / "other"),
            "one": str(folders[2]),
        }
        compared = client.get("/compare", params={"run": ["old~runs~gpt", "new~runs~gpt"]})
        assert compared.status_code == 200


def test_runs_that_are_not_listed_are_counted_and_other_folders_push_none_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dashboard.api.runs.MOST_RUNS", 2)
    for name in ("a", "b", "c"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in ("x", "y", "z"):
        write_run(tmp_path / "runs" / name, freezing_records(steps=5))
    settings = replace(settings_in(tmp_path / "service"), runs=(tmp_path / "runs",))
    headers = {"Authorization": f"Bearer {token(settings, Role.READ)}"}
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8270", headers=headers) as client:
        answer = client.get("/api/v1/runs").json()
        assert ([each["run"] for each in answer["runs"]], answer["left_out"]) == (["x", "y"], 1)
        assert "1 more run is left out" in client.get("/runs").text
        assert client.get("/runs/z").status_code == 200


def test_the_links_of_a_run_s_page_hold_its_name_whatever_it_is(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "50% a?b#c", freezing_records(steps=5))
    settings = replace(settings_in(tmp_path / "service"), runs=(tmp_path / "runs",))
    headers = {"Authorization": f"Bearer {token(settings, Role.READ)}"}
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8270", headers=headers) as client:
        (link,) = (each for each in Page(client.get("/runs").text).all("a") if "50%" in each["href"])
        page = Page(client.get(link["href"]).text)
        links = [each["href"] for each in page.all("a") if each["href"].endswith(("what-if", "decisions"))]
        links += [each["data-from"] for each in page.all("section") if "data-from" in each]
        assert len(links) > 5
        assert {client.get(each).status_code for each in links} == {200}


def test_each_way_to_have_a_change_is_for_the_plan_that_it_was_simulated_on() -> None:
    view = training()
    changes = [
        WhatIfForm(ranks=2),
        WhatIfForm(cut="3+3+3+1"),
        WhatIfForm(cut="keep", r_max=0.5),
    ]
    found = [
        way.control
        for asked in changes
        for way in ways(what_if(view, profile(), asked.change), asked, "1.1")
        if way.control
    ]
    assert {control.partition("?")[0] for control in found} == {"scale", "plan", "freeze"}
    assert all(control.endswith("version=1.1") for control in found)


class WithProfile(Shown):
    def profile(self):  # type: ignore[override]
        return profile()


def expected(command: JobCommand) -> tuple[str, bool]:
    view = training()
    live = WithProfile(view=view, name="gpt", base="/jobs/gpt", live=True, lost=False, trouble="", folder="")
    simulated = expectation(live, command)
    return f"{command.says(view)} {simulated.text}", simulated.possible


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (Pause(), "gives its ranks back"),
        (Move(layers="7", rank=2), r"predicted to take 1.18 s now and .* shorter"),
        (
            Move(layers="0", rank=2),
            "This is not possible: .*The rank holds layers 5 to 6 and can take",
        ),
        (
            Move(layers="7", rank=7),
            r"not possible: rank 7 has no place in the pipeline; .* 0, 1, 2, 3",
        ),
        (Move(layers="8-7", rank=2), "not possible: .*runs backwards: write 7-8"),
        (Scale(ranks=2), "trains with 2 ranks .* longer"),
        (Scale(ranks=1), "not possible: .*nothing fits the memory"),
        (Scale(spares=1), "trains with 1 spare .* Nothing is simulated: spares hold no layers"),
        (Freeze(r_max=0.5), "Nothing is simulated: r_max changes nothing with method none"),
        (Freeze(method="none"), "Nothing is frozen any more.* The simulator expects"),
        (Freeze(method="timelyfreeze", r_max=0.5), "r_max 0.5 .* shorter"),
        (Freeze(method="timelyfreeze"), "method timelyfreeze .* shorter"),
        (Freeze(method="prefix", prefix=5), "5 layers frozen from .* expects: .* shorter"),
        (Freeze(method="prefix", prefix=10), "not possible: prefix = 10 .* so give at most 9"),
        (Freeze(method="apf"), "Nothing is simulated: apf freezes what has settled"),
        (Freeze(method="timely"), "Nothing is simulated: timely is no freeze method"),
        (Drain(node="5f0c"), r"ranks there \(0, 1\) move .* longer"),
        (Drain(node="elsewhere"), "no ranks on elsewhere"),
        (Undrain(node="elsewhere"), "was not asked to leave elsewhere"),
        (Apply(partition=[3, 3, 3, 1]), "take up 3 .* 3 .* 3 .* 1 .* shorter"),
        (Apply(partition=[5, 5]), "not possible: .*stages"),
    ],
)
def test_each_control_says_what_it_will_do_and_what_the_simulator_expects(
    command: JobCommand, said: str
) -> None:
    told, possible = expected(command)
    assert re.search(said, told), told
    assert possible == ("not possible" not in said)


def test_a_drain_of_one_of_several_pipelines_says_why_nothing_is_simulated() -> None:
    view = training()
    view.followed = replace(plan(), replicas=2)
    said = expectation(shown(view), Drain(node="5f0c"))
    assert said.text.startswith("Nothing is simulated: the job has 2 pipelines")
    assert said.possible
    assert not simulates(view, Drain(node="5f0c"))


@pytest.mark.parametrize("command", [Move(layers="1", rank=0), Freeze(r_max=0.5), Drain(node="5f0c")])
def test_a_job_without_a_plan_says_that_nothing_is_simulated(command: JobCommand) -> None:
    said = expectation(shown(JobView(job="gpt")), command)
    assert said == Expected("Nothing is simulated: the job has no plan yet.")


def test_a_form_that_is_filled_in_badly_says_which_field() -> None:
    with pytest.raises(ProblemAnswer, match='Layers is "x", and must be a layer such as 3'):
        CONTROLS["move"].parse({"layers": "x", "rank": "1"})
    with pytest.raises(ProblemAnswer, match="send one or more of ranks, pipelines, spares"):
        CONTROLS["scale"].parse({"ranks": "", "spares": ""})
    assert CONTROLS["plan"].parse({"partition": "3+2, 1"}) == Apply(partition=[3, 2, 1])


class Answering(JobClient):
    """A client whose job answers a cut with an error: real controllers do so only at the right moment."""

    def __init__(self, error: JobError) -> None:
        super().__init__()
        self.error = error
        self.bases: list[object] = []

    async def send(self, job: str, command: JobCommand) -> Command:
        assert isinstance(command, Apply)
        self.bases.append(command.base)
        raise self.error


@pytest.mark.parametrize(
    ("error", "same_key", "version", "advice"),
    [
        (
            PlanChanged("plan 1.1 is not the newest one any more", 1, 2),
            False,
            "1.2",
            "The button now asks to replace plan 1.2.",
        ),
        (
            PlanChanged("another move is about to change plan 1.1", 1, 1),
            False,
            "1.1",
            "Ask again once the job's page shows the layers in their new places.",
        ),
        (Refused("another move is under way"), False, "1.1", "See the job's state before you ask again."),
        (NoController("the controller is gone"), False, "1.1", "Submit the job again with resume"),
        (
            ControllerSilent("the controller does not answer"),
            True,
            "1.1",
            "Ask again in a few seconds.",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, JobError) else "",
)
def test_a_refused_control_can_be_sent_again(
    settings: ServiceSettings, error: JobError, same_key: bool, version: str, advice: str
) -> None:
    """Under its old key it would be answered as before; only a control that may have arrived keeps its key."""
    app = create_app(settings)
    show(app, live_job())
    app.state.services.live.client = answering = Answering(error)
    headers = {"Authorization": f"Bearer {token(settings)}"}
    with TestClient(app, base_url="http://127.0.0.1:8270", headers=headers) as client:
        path = "/jobs/gpt/controls/plan"
        form = inputs(client.get(path, params={"partition": "3+3+3+1", "version": "1.1"}))
        refused = client.post(path, data=form)
        (told,) = re.findall(r'role="alert">(.*?)</p>', refused.text, re.DOTALL)
        assert told.startswith(f"{error}<br>{escape(advice)}")
        again = inputs(refused)
        assert (again["key"] == form["key"], again["version"]) == (same_key, version)
        assert again["partition"] == "3+3+3+1"
        client.post(path, data=again)
        assert answering.bases == [(1, 1), tuple(map(int, version.split(".")))]


def inputs(answer: Response) -> dict[str, str]:
    """The hidden fields of the form that asks."""
    return {each["name"]: each["value"] for each in Page(answer.text).all("input") if "value" in each}


def test_a_sparkline_needs_two_losses() -> None:
    assert sparkline([1.0]) is None
    line = sparkline([2.0, 1.0, 1.0])
    assert line is not None
    assert line.points.split()[0] == "3.0,3.0"
    assert line.words == "loss from 2.0000 to 1.0000, lowest 1.0000"


def test_an_unknown_path_is_a_page_for_a_browser_and_a_problem_for_a_program(client: TestClient) -> None:
    answer = client.get("/nowhere", headers={"Accept": "text/html"})
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/html")
    assert "there is no /nowhere" in answer.text
    assert "The start page lists the jobs" in answer.text
    assert client.get("/nowhere").json()["detail"] == "there is no /nowhere"
    api = client.get("/api/v1/nowhere", headers={"Accept": "text/html"})
    assert api.headers["content-type"] == "application/problem+json"
