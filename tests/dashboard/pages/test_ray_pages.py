"""The pages of a job on a real cluster in a real browser: they follow it, pause and resume it, move a layer, and drain
a node, each after asking."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest
from browser import Browser, browser, needs_browser, wait_for
from ray.cluster_utils import Cluster
from ray_jobs import assert_nothing_left, driver_of
from ray_nodes import add_node, start_head
from selenium.webdriver.common.by import By
from serving import served, token
from tiny_jobs import tiny

from dashboard.service.settings import ServiceSettings
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.client.job_client import JobClient

pytestmark = [needs_browser, pytest.mark.xdist_group("ray pages")]

JOB = "shown"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two nodes, each with room for the whole job."""
    found = start_head(2)
    try:
        add_node(found, 2)
        with driver_of(found):
            yield found
            assert_nothing_left()
    finally:
        found.shutdown()


@pytest.fixture(scope="module")
def window(nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that is logged in, while the job trains."""
    folder = tmp_path_factory.mktemp("live")
    settings = ServiceSettings(
        address=nodes.address,
        tokens=folder / "tokens.json",
        audit=folder / "audit.jsonl",
        roots=(folder,),
    )
    spec = tiny(
        folder,
        JOB,
        job={"steps": 100_000, "sample_tokens": 0},
        model={"layers": 8},
        pipeline={"ranks": 2},
        cluster={
            "device": "emulated",
            "emulated": {"forward_s": 0.004, "input_grad_s": 0.004, "weight_grad_s": 0.004},
        },
    )
    client = BlockingJobClient(nodes.address)
    asyncio.run(JobClient(nodes.address).submit(spec))
    try:
        with served(settings) as address, browser(address, tmp_path_factory.mktemp("profile")) as window:
            window.open("/")
            window.log_in(token(settings))
            yield window
    finally:
        client.outcome(client.abort(JOB), timeout_s=30)
        asyncio.run(client.waiting.dismiss(JOB))


def step_of(window: Browser) -> int:
    found = re.search(r"step ([\d,]+) of", window.text("#head .progress"))
    return int(found[1].replace(",", "")) if found else 0


def state(window: Browser) -> str:
    return window.text("#head .pill")


def layers_on(window: Browser) -> dict[str, list[str]]:
    """Rank -> layers that are there or leaving."""
    return window.script(
        "return Object.fromEntries([...document.querySelectorAll('#map .rank')].map((rank) => ["
        "rank.querySelector('h4').firstChild.textContent.trim(),"
        " [...rank.querySelectorAll('.layer:not(.arriving)')].map((box) => box.firstChild.textContent.trim())]))"
    )


def test_a_live_job_is_watched_paused_moved_and_drained(window: Browser) -> None:
    wait_for(lambda: JOB in window.text("article.job"), "the job on the start page")
    window.until("return document.querySelector('.spark')")
    window.shoot("live-jobs")
    window.press("article.job a")

    # It follows the job: figures and curves grow, and the curves are not drawn again.
    window.until("return document.querySelector('#training figure.drawn')")
    window.script("window.first = document.querySelector('#training canvas')")
    window.press("#training details summary")
    begun = step_of(window)
    wait_for(lambda: step_of(window) > begun + 5, "five more steps on the page")
    client = BlockingJobClient()
    ahead = client.view(JOB).step
    wait_for(lambda: step_of(window) >= ahead, "the step that the controller was at")
    assert window.script(
        "return [window.first.isConnected, document.querySelector('#training details').open]"
    ) == [
        True,
        True,
    ]
    assert window.violations() == []

    # A layer moves, and is seen at both ranks meanwhile.
    before = layers_on(window)
    layer = before["rank 1"][0]
    window.press(".controls summary")
    window.driver.find_element(By.ID, "move-layers").send_keys(layer)
    window.driver.find_element(By.ID, "move-rank").send_keys("0")
    window.press("form[action$='controls/move'] button")
    wait_for(lambda: f"Layer {layer} moves to rank 0" in window.text(".ask"), "the question")
    assert window.violations() == []
    window.shoot("live-ask")
    window.press(".ask button")
    wait_for(lambda: layer in layers_on(window).get("rank 0", ()), "the layer at rank 0")
    assert layers_on(window)["rank 1"] == before["rank 1"][1:]
    wait_for(lambda: "done move" in window.text("#commands"), "the outcome of the move")
    wait_for(lambda: "done move" in window.text("#announced"), "the outcome, for who cannot see it")
    window.shoot("live-job")

    # Pause, and resume.
    for control, then in (("pause", "paused"), ("resume", "training")):
        window.press(f".controls a[href$='controls/{control}']")
        window.press(".ask button")
        wait_for(lambda then=then: state(window) == then, then)

    # Drain a node: its ranks' layers go to ranks on the other one.
    window.open("/cluster")
    window.shoot("live-cluster")
    assert window.violations() == []
    window.press(".node .button.danger")
    wait_for(lambda: "The job leaves" in window.text(".ask"), "the question")
    window.press(".ask button")
    node = wait_for(lambda: window.text("#map .node.leaving .id"), "a node that is leaving")
    window.shoot("live-draining")
    wait_for(lambda: "done drain" in window.text("#commands"), "the outcome of the drain")
    wait_for(lambda: node not in window.text("#map"), "a map without the node")
    assert sorted(int(layer) for of in layers_on(window).values() for layer in of) == list(range(10))
    window.until("return document.querySelector('#recovery table')")
    window.shoot("live-drained")
    assert window.console() == []
