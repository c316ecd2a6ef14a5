"""The live page in a real browser."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from ...support.browser import opened_browser
from ...support.http_server import HttpServer, until
from ...support.tiny_models import save_tiny, tiny_sdxl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("model")
    model = save_tiny(folder / "tiny", tiny_sdxl(), guidance_scale=3.0, resolutions=["32", "64x32"])
    with HttpServer(model, folder / "workspace", "--slo-scale", "1000") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with opened_browser() as opened:
        yield opened


def test_draw_watch_cancel(server: HttpServer, browser: webdriver.Chrome, tmp_path: Path) -> None:
    browser.get(server.url)

    def text(name: str) -> str:
        return browser.find_element(By.ID, name).text

    until(lambda: text("status") == "ready")
    assert text("model").endswith("tiny")
    steps, prompt = browser.find_element(By.ID, "steps"), browser.find_element(By.ID, "prompt")
    for field, value in ((steps, "150"), (prompt, "<img src=x onerror=alert(1)> & 'quotes'")):
        field.clear()
        field.send_keys(value)
    browser.find_element(By.ID, "go").click()
    image = browser.find_element(By.ID, "image")
    seen: list[str] = []

    def has_final() -> bool:
        now = image.get_attribute("data-partial")
        if now and now not in seen:
            seen.append(now)
        return now == "final"

    until(has_final)
    assert len(seen) >= 3, "two partial images at the least, then the last"
    assert text("told").startswith("done in ")
    assert text("caption") == "<img src=x onerror=alert(1)> & 'quotes'", "a hostile prompt stays text"
    until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#recent img")) == 1)
    # Another one, taken back.
    steps.clear()
    steps.send_keys("200")
    browser.find_element(By.ID, "go").click()
    until(lambda: text("told").startswith("step "))
    browser.find_element(By.ID, "stop").click()
    until(lambda: text("told") == "cancelled")
    until(lambda: 'finished_reason="cancelled"} 1.0' in httpx.get(f"{server.url}/metrics").text)
    for width in (1200, 400):
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": width < 1000},
        )
        until(lambda width=width: browser.execute_script("return window.innerWidth") == width)
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        browser.save_screenshot(str(tmp_path / f"page-{width}.png"))
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []
