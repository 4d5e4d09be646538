"""A real browser for tests of pages: Chromium without a window, through its driver."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)


def find_browser() -> tuple[str, str]:
    """Paths of Chromium and its driver; the test is skipped where one is missing."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not both installed: no page is opened")
    return chromium, driver


@contextmanager
def opened(
    page: Path, folder: Path, *, width: int = 1200, height: int = 900, dark: bool = False
) -> Iterator[Any]:
    """A driver that has opened a page of this machine, with a profile of its own in `folder`."""
    chromium, path = find_browser()
    selenium = pytest.importorskip("selenium", reason="selenium is not installed")
    assert selenium
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (*ARGUMENTS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(path))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        driver.get(page.resolve().as_uri())
        yield driver
    finally:
        driver.quit()


def messages(driver: Any) -> list[str]:
    """Messages of the page on the console, with errors that nobody caught."""
    return [entry["message"] for entry in driver.get_log("browser")]


def requests(driver: Any) -> list[str]:
    """Addresses that the page asked for, itself not among them."""
    page, found = driver.current_url, []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked = message["params"]
            if asked["documentURL"] == page and asked["request"]["url"] != page:
                found.append(asked["request"]["url"])
    return [url for url in found if not url.startswith("data:")]
