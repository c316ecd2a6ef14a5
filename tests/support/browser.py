"""A real browser, for pages of the server."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from selenium import webdriver


@contextmanager
def opened_browser() -> Iterator[webdriver.Chrome]:
    """Chromium without a window, whose console is kept."""
    driver = shutil.which("chromedriver")
    assert driver is not None, "install Debian's chromium and chromium-driver: the page is tested in a browser"
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1100"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield opened
    finally:
        opened.quit()
