"""The pages of past runs in a real browser: log in, look at every page, read a timeline. No message on the console,
nothing that axe finds, light and dark, and as narrow as a phone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser import Browser, browser, needs_browser
from page_runs import page_settings
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from serving import served, token

from dashboard.service.settings import ServiceSettings

PAGES = {
    "jobs": "/",
    "runs": "/runs",
    "run": "/runs/frozen",
    "rehearsal": "/runs/rehearsal",
    "decisions": "/runs/gpt/decisions",
    "step": "/runs/frozen/steps?step=25",
    "what-if": "/runs/gpt/what-if?slow_rank=1",
    "compare": "/compare?run=gpt&run=frozen&run=rehearsal",
    "error": "/runs/nope",
}

pytestmark = needs_browser


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServiceSettings:
    return page_settings(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def window(settings: ServiceSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with served(settings) as address, browser(address, tmp_path_factory.mktemp("profile")) as window:
        window.open("/runs")
        assert window.violations() == []
        window.log_in("no token of ours")
        assert window.text("[role=alert]") == "There is no such token."
        window.console()  # has the 401
        window.log_in(token(settings))
        assert window.driver.current_url == f"{address}/runs"
        yield window


def looks() -> Iterator[Any]:
    """Every page, wide and light as well as narrow and dark: in turns in `make test`, both in `make bench`."""
    for number, name in enumerate(PAGES):
        for width, dark in ((1240, False), (400, True)):
            marks = [pytest.mark.soak] if (number + dark) % 2 else []
            yield pytest.param(
                name, width, dark, id=f"{name}-{'narrow-dark' if dark else 'wide-light'}", marks=marks
            )


@pytest.mark.parametrize(("name", "width", "dark"), looks())
def test_every_page_is_reachable_for_everyone(window: Browser, name: str, width: int, dark: bool) -> None:
    window.look(width, dark=dark)
    window.open(PAGES[name])
    assert window.violations() == []
    assert window.script("const page = document.documentElement; return page.scrollWidth <= page.clientWidth")
    drawn, figures = window.script(
        "const all = (q) => document.querySelectorAll(q).length;"
        "return [all('figure.chart.drawn, figure.timeline-view.drawn'), all('figure')]"
    )
    assert drawn == figures
    # A browser tells of the error's status itself.
    assert [message for message in window.console() if name != "error"] == []
    window.shoot(f"{name}-{width}-{'dark' if dark else 'light'}")


def test_a_timeline_is_read_with_the_keyboard(window: Browser) -> None:
    window.look(1240, dark=False)
    window.open("/runs/frozen")
    assert "200 measured and predicted" in window.text("#timeline h2")
    canvas = window.driver.find_element(By.CSS_SELECTOR, "#timeline canvas")
    canvas.send_keys("n")
    assert "rank 0" in window.text("#timeline output")
    canvas.send_keys(Keys.PAGE_DOWN, "+", "+")
    assert "rank 1" in window.text("#timeline output")
    assert window.script(
        "const view = freshetTimelines.of(document.querySelector('#timeline figure'));"
        "return view.to - view.from < view.data.end"
    )
    assert window.console() == []


def test_the_first_thing_that_the_tab_key_reaches_leads_to_the_content(window: Browser) -> None:
    window.open("/runs")
    window.driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    assert window.script("return document.activeElement.textContent") == "Skip to the content"
    window.press("input[value=gpt]")
    window.press("input[value=frozen]")
    window.press("main form[action='/compare'] button")
    window.until("return document.querySelector('h1')?.textContent === 'Compared'")
