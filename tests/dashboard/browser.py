"""Debian's Chromium with its driver: a window that logs in, looks at pages, and tells what is wrong with them."""

from __future__ import annotations

import base64
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM
from pace import patient
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

DRIVER = shutil.which("chromedriver") or ""
needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Chromium and its driver")
SCREENSHOTS = os.environ.get("FRESHET_SCREENSHOTS", "")
"""Folder for screenshots; empty: none are made."""
TALLEST = 6_000
WAIT_S = 60.0


class Browser:
    """One window on the service at `address`."""

    def __init__(self, driver: webdriver.Chrome, address: str) -> None:
        self.driver = driver
        self.address = address

    def open(self, path: str) -> None:
        """Go to a page, and wait until what it loads later is there."""
        self.driver.get(self.address + path)
        self.until(
            "return [...document.querySelectorAll('section[data-late]')].every(each => each.dataset.loaded)"
        )

    def log_in(self, token: str) -> None:
        """Fill in the form of the login page, and wait for the page that answers."""
        self.driver.find_element(By.ID, "token").send_keys(token)
        self.driver.find_element(By.CSS_SELECTOR, "main button").click()
        there = "return document.getElementById('token')?.value !== arguments[0]"
        wait_for(lambda: self.script(there, token), "the page after the login")

    def press(self, selector: str) -> None:
        """Click the first element that `selector` finds; found again if a live page puts a new one in its place."""

        def clicked() -> bool:
            try:
                self.driver.find_element(By.CSS_SELECTOR, selector).click()
            except StaleElementReferenceException:
                return False
            return True

        wait_for(clicked, f"{selector}, to be clicked")

    def script(self, code: str, *arguments: Any) -> Any:
        """What `code` returns in the page."""
        return self.driver.execute_script(code, *arguments)

    def text(self, selector: str) -> str:
        """The text of the first element that `selector` finds, with single blanks; empty if there is none."""
        found = self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return " ".join(found.split())

    def until(self, code: str, *, within_s: float = WAIT_S) -> Any:
        """Wait until `code` returns something true; return it."""
        return wait_for(lambda: self.script(code), code, within_s)

    def look(self, width: int, *, dark: bool) -> None:
        """Make the window `width` pixels wide, light or dark."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def console(self) -> list[str]:
        """Messages since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def violations(self) -> list[str]:
        """What axe finds on the page. The page's policy forbids foreign scripts, so axe comes through the debugger."""
        self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": _axe()})
        return self.driver.execute_async_script(
            "const done = arguments[0]; axe.run(document, {resultTypes: ['violations']}).then((found) => done("
            "found.violations.flatMap((each) => each.nodes.map((node) => `${each.id}: ${node.html}`))))"
        )

    def shoot(self, name: str) -> None:
        """Write a picture of the whole page to `SCREENSHOTS`, if that is set."""
        if not SCREENSHOTS:
            return
        # Layers that move are on their way for a moment: Chromium would take the picture of half a page.
        self.until("return !document.getAnimations().some((each) => each.playState === 'running')")
        # From the top: the list of rooms would stick where the page was scrolled to, over what is there.
        width, height, scrolled = self.script(
            "const at = scrollY; scrollTo(0, 0);"
            " return [innerWidth, document.documentElement.scrollHeight, at]"
        )
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, TALLEST), "scale": 1}
        picture = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
        )
        self.script("scrollTo(0, arguments[0])", scrolled)
        folder = Path(SCREENSHOTS)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").write_bytes(base64.b64decode(picture["data"]))


def wait_for(found: Callable[[], Any], what: str, within_s: float = WAIT_S) -> Any:
    """Wait until `found()` is true; return it."""
    within_s = patient(within_s)
    end_s = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < end_s, f"after {within_s:g} s still not: {what}"
        time.sleep(0.05)
    return value


def _axe() -> str:
    return resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")


@contextmanager
def browser(address: str, profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile in `profile`, which reaches nothing but this machine."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-dev-shm-usage",
        "--proxy-server=127.0.0.1:9",
        "--proxy-bypass-list=127.0.0.1",
        f"--user-data-dir={profile}",
        "--window-size=1240,1000",
    ):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_script_timeout(60)
        driver.implicitly_wait(10)  # a click may return before the next page is there
        yield Browser(driver, address)
    finally:
        driver.quit()
