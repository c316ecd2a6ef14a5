"""A real browser, for pages of the server."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from selenium import webdriver

from .tools import need_tools

BROWSER = ("chromium", "chromedriver")


@contextmanager
def opened_browser() -> Iterator[webdriver.Chrome]:
    """Start a headless Chromium that records its console. Skips the test if Chromium is not installed."""
    need_tools(*BROWSER)
    browser, driver = (shutil.which(name) or name for name in BROWSER)
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
