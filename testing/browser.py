"""Debian's Chromium without a window, as the tests of reports, bench/report.py and docs/screenshots.py use it."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DRAWN = "return [...document.querySelectorAll('figure')].every(f => f.dataset.drawn === 'yes')"


def missing() -> str:
    """What is not installed; empty where all is."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not installed (apt-get install chromium chromium-driver)" if lacking else ""


@contextmanager
def browser(width: int = 1200, height: int = 900, *, dark: bool = False) -> Iterator[Any]:
    """A driver whose pages are ``width`` wide, and which records console and network."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        show_as(driver, width, height, dark=dark)
        yield driver
    finally:
        driver.quit()


def show_as(driver: Any, width: int, height: int, *, dark: bool) -> None:
    """The size and the colour scheme that pages are shown in."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def load(driver: Any, path: Path, seconds: float = 30) -> None:
    """Opens a file and waits until its figures are drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(path.resolve().as_uri())
    WebDriverWait(driver, seconds, poll_frequency=0.05).until(lambda d: d.execute_script(DRAWN))


def requests(driver: Any) -> list[str]:
    """Addresses that were asked for since the last call, the pages themselves (file:) and data in them apart."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]


def screenshot(driver: Any, path: Path) -> None:
    """The whole page, as long as it is."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    width = driver.execute_script("return document.documentElement.clientWidth")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    picture = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    path.write_bytes(base64.b64decode(picture["data"]))


def console(driver: Any) -> list[str]:
    """What the console has said since the last call."""
    return [f"{entry['level']}: {entry['message']}" for entry in driver.get_log("browser")]


def text(driver: Any, selector: str) -> Any:
    """Its content, seen or not."""
    return driver.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def opened(driver: Any, path: Path) -> None:
    """Loads a page, which must be quiet, alone, and as wide as the window."""
    console(driver), requests(driver)
    load(driver, path)
    assert console(driver) == []
    assert requests(driver) == []
    assert (
        driver.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    )
    assert driver.execute_script("return window.broken") is None
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
