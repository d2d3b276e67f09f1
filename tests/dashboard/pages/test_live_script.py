"""The script that keeps a job's page fresh, in a real browser, while this test makes the job's events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import synthetic_run
from browser import Browser, browser, needs_browser, wait_for
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from serving import Made, listening, settings_in, show, token

from dashboard.app import create_app
from dashboard.service.limits import AtOnce
from dashboard.service.settings import ServiceSettings
from orchestrator.client.cluster_state import NodeState
from orchestrator.client.errors import ClusterSilent
from orchestrator.client.job_client import JobClient
from orchestrator.events.types import Answered, Commanded, Event, Finished, RankStarted, Record

pytestmark = [needs_browser, pytest.mark.xdist_group("live script")]

FASTER = 10
"""Factor on the page's clock: it waits this many times shorter."""
CLOCK = f"""
window.timers = window.streams = 0;
window.EventSource = class extends EventSource {{
  constructor(address) {{
    super(address);
    window.streams += 1;
  }}
}};
const wait = window.setTimeout;
window.setTimeout = (call, ms, ...given) => {{
  window.timers += 1;
  return wait((...given) => {{ window.timers -= 1; call(...given); }}, ms / {FASTER}, ...given);
}};
"""
"""Counts streams and the timers that run, and makes these faster."""


class Service:
    """A service that shows one job, `gpt`, which trains."""

    def __init__(self, folder: Path) -> None:
        self.settings: ServiceSettings = settings_in(folder)
        self.job = Made("gpt")
        for record in synthetic_run.records(steps=40):
            if not isinstance(record.event, Finished):
                self.job.take(record)
        self.cluster: JobClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port = 0
        self._open: AtOnce | None = None

    @contextmanager
    def open(self) -> Iterator[str]:
        """Serve, always at the same port."""
        app = create_app(self.settings)
        self._open = app.state.services.streams
        show(app, self.job)
        app.state.services.live.client = self.cluster

        def start() -> None:
            self._loop = asyncio.get_running_loop()

        app.state.services.live.start = start
        with listening(app, self._port) as address:
            self._port = urlsplit(address).port or 0
            yield address

    def streams(self) -> int:
        """How many are open."""
        assert self._open is not None
        return self._open.open

    def do(self, call: Callable[[], None]) -> None:
        """Call `call` on the service's event loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call)

    def happens(self, event: Event) -> None:
        record = Record(time_s=self.job.view.last_s + 0.1, event=event)
        self.do(lambda: self.job.take(record))

    def step(self) -> int:
        """Let the job commit a step; return its number."""
        number = self.job.view.step + 1
        self.happens(synthetic_run.step_report(number, random.Random(number)))
        return number


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def window(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that is logged in."""
    with service.open() as address, browser(address, tmp_path_factory.mktemp("profile")) as window:
        window.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": CLOCK})
        window.open("/")
        window.log_in(token(service.settings))
        yield window


class Cluster(JobClient):
    """A cluster without nodes."""

    silent = False

    async def nodes(self) -> tuple[NodeState, ...]:
        if self.silent:
            raise ClusterSilent("the cluster has not answered for 10 s")
        return ()


def logged_in(window: Browser, address: str, service: Service) -> None:
    """Log in to another service."""
    window.driver.get(f"{address}/login")
    window.log_in(token(service.settings))


def shows(window: Browser, step: int) -> None:
    """Wait until the page shows `step`."""
    window.until(f"return document.querySelector('#head .progress').textContent.includes('step {step} of')")


def says(window: Browser, words: str) -> None:
    """Wait until the page says `words` of its connection."""
    window.until(f"return document.querySelector('.connection').textContent.includes('{words}')")


def fetched(window: Browser) -> int:
    """How many sections were fetched since the page was opened."""
    return window.script(
        "return performance.getEntriesByType('resource').filter((each) => each.name.includes('/parts/')).length"
    )


def test_a_timeline_that_someone_reads_is_looked_at_again_by_one_timer(
    service: Service, window: Browser
) -> None:
    window.open("/jobs/gpt")
    shows(window, service.step())
    window.driver.find_element(By.CSS_SELECTOR, "#timeline canvas").send_keys("+", "+")
    for number in range(1, 9):
        for report in synthetic_run.timelines(service.job.view.step, random.Random(number)):
            service.happens(report)
    shows(window, service.step())
    # One each at most for the curves, the output, the timeline and the memory, however many reports there were.
    assert window.script("return window.timers") <= 4


def test_what_is_filled_in_stays_and_what_comes_of_a_control_is_announced(
    service: Service, window: Browser
) -> None:
    window.open("/jobs/gpt")
    window.press(".controls summary")
    window.driver.find_element(By.ID, "move-layers").send_keys("3-4")
    for field, choice in (("drain-node", "a91e"), ("freeze-method", "apf")):
        Select(window.driver.find_element(By.ID, field)).select_by_value(choice)
    # While someone is at a form it stays as it is; then it has the new node too.
    service.happens(RankStarted(rank=4, node="77aa", host="10.0.0.9", pid=1))
    service.happens(Commanded(id="a", name="stop", arguments={}))
    window.until("return document.getElementById('announced').textContent.includes('under way cancel')")
    assert not window.script("return document.querySelector('option[value=\"77aa\"]')")
    window.script("document.activeElement.blur()")
    window.until("return document.querySelector('option[value=\"77aa\"]')")
    filled = (
        "return ['move-layers', 'drain-node', 'freeze-method'].map((id) => document.getElementById(id).value)"
    )
    assert window.script(filled) == ["3-4", "a91e", "apf"]
    assert window.script("return document.querySelector('.controls details').open")
    service.happens(Answered(id="a", done=False, step=40, text="the job went on"))
    window.until(
        "return document.getElementById('announced').textContent.includes('refused cancel: the job')"
    )
    assert window.violations() == []


def test_hidden_pages_leave_their_connections_to_others(service: Service, window: Browser) -> None:
    """A browser has six connections to a service."""
    window.open("/jobs/gpt")
    first = window.driver.current_window_handle
    for _ in range(7):
        window.driver.switch_to.new_window("tab")
        window.open("/jobs/gpt")
        shows(window, service.step())
    wait_for(lambda: service.streams() == 1, "the stream of the page that is seen, alone")
    missed = service.step()
    for handle in window.driver.window_handles:
        if handle != first:
            window.driver.switch_to.window(handle)
            window.driver.close()
    window.driver.switch_to.window(first)
    shows(window, missed)


def test_the_list_of_jobs_is_fetched_when_a_job_has_changed(service: Service, window: Browser) -> None:
    window.open("/")
    wait_for(lambda: service.streams() == 1, "the page's stream")
    wait_for(lambda: fetched(window) == 1, "what has changed before the stream began")
    for fetches in (2, 3):
        step = service.step()
        window.until(
            f"return document.querySelector('article.job .progress').textContent.includes('step {step} of')"
        )
        # The browser may list a fetch a moment after the page shows what it brought.
        wait_for(lambda fetches=fetches: fetched(window) == fetches, f"{fetches} fetches, and no more")


def test_a_page_whose_job_has_ended_is_quiet_until_the_job_goes_on(service: Service, window: Browser) -> None:
    window.open("/jobs/gpt")
    sections = window.script("return document.querySelectorAll('section[data-from]').length")
    shows(window, service.step())
    service.do(service.job.end)
    window.until("return window.streams > 5")
    assert sections < fetched(window) < 2 * sections
    # A controller goes on with it.
    service.job.gone = False
    shows(window, service.step())


def test_a_page_says_who_does_not_answer(tmp_path: Path, window: Browser) -> None:
    service = Service(tmp_path)
    service.cluster = cluster = Cluster()
    with service.open() as address:
        logged_in(window, address, service)
        window.driver.get(f"{address}/cluster")
        cluster.silent = True
        says(window, "The cluster does not answer")
        cluster.silent = False
        window.until("return document.querySelector('.connection').hidden")
    says(window, "The service does not answer")


def test_a_page_whose_session_has_expired_leads_to_the_login(tmp_path: Path, window: Browser) -> None:
    service = Service(tmp_path)
    with service.open() as address:
        logged_in(window, address, service)
        window.driver.get(f"{address}/jobs/gpt")
        shows(window, service.step())
    says(window, "reconnecting")
    service.settings.tokens.unlink()
    with service.open():
        window.until("return location.pathname === '/login'")


def test_a_page_goes_on_with_a_service_that_was_started_again(tmp_path: Path, window: Browser) -> None:
    """Its session is as valid there, and what has happened meanwhile is shown."""
    service = Service(tmp_path)
    with service.open() as address:
        logged_in(window, address, service)
        window.driver.get(f"{address}/jobs/gpt")
        shows(window, service.step())
        window.script("window.before = true")
    says(window, "reconnecting")
    missed = service.job.view.step + 1
    report = synthetic_run.step_report(missed, random.Random(missed))
    service.job.take(Record(time_s=service.job.view.last_s + 0.1, event=report))
    with service.open():
        shows(window, missed)
        window.until("return document.querySelector('.connection').hidden")
        shows(window, service.step())
        assert window.script("return [window.before, location.pathname]") == [True, "/jobs/gpt"]
