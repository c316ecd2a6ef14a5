"""A real browser, for pages of the server. Without one, tests are skipped; `PSCTL_TESTS_NEED_BROWSER=1` fails them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver

_MISSING = "install Debian's chromium and chromium-driver: the page is tested in a browser"


def find_browser() -> tuple[str, str] | None:
    """Chromium and its driver. Fails the test where there is none and `PSCTL_TESTS_NEED_BROWSER` is set."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is not None and driver is not None:
        return browser, driver
    if os.environ.get("PSCTL_TESTS_NEED_BROWSER"):
        pytest.fail(_MISSING)
    return None


@contextmanager
def opened_browser() -> Iterator[webdriver.Chrome]:
    """Chromium without a window, whose console is kept. Skips the test where there is none, see `find_browser`."""
    found = find_browser()
    if found is None:
        pytest.skip(_MISSING)
    browser, driver = found
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1100"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield opened
    finally:
        opened.quit()
