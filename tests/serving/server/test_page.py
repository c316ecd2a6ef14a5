"""The live page in a real browser."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.families.references import CROPPED

from ...support.browser import opened_browser
from ...support.edits import image_of
from ...support.http_server import HttpServer
from ...support.plain import plain_image
from ...support.tiny_families import tiny_klein
from ...support.tiny_models import save_tiny, tiny_sdxl
from ...support.waits import until

pytestmark = pytest.mark.slow

# Positions of the controls, in pixels from the top of the page.
TOPS = """return ["prompt", "go", "stop", "told", "edit-drawn"].map(
    (id) => document.getElementById(id).getBoundingClientRect().top + window.scrollY)"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("model")
    model = save_tiny(folder / "tiny", tiny_sdxl(), guidance_scale=3.0, resolutions=["64x32", "256"])
    with HttpServer(model, folder / "workspace", "--slo-scale", "1000") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with opened_browser() as opened:
        yield opened


def set_width(browser: webdriver.Chrome, width: int) -> None:
    device = {"width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": width < 1000}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    until(lambda: browser.execute_script("return window.innerWidth") == width)


def test_draw_watch_and_cancel_in_the_browser(server: HttpServer, browser: webdriver.Chrome, tmp_path: Path) -> None:
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
    # Another request, which is cancelled. It has more patches than the empty batch has room for.
    browser.execute_script("document.getElementById('size').value = '256x256'")
    steps.clear()
    steps.send_keys("200")
    until(lambda: text("step") == "nothing is being drawn")
    tops = browser.execute_script(TOPS)
    browser.find_element(By.ID, "go").click()
    until(lambda: text("told").startswith("step ") and ": 1 images" in text("step"))
    assert browser.execute_script(TOPS) == tops, "no control moves from under the pointer while an image is drawn"
    browser.find_element(By.ID, "stop").click()
    until(lambda: text("told") == "cancelled")
    until(lambda: 'finished_reason="cancelled"} 1.0' in httpx.get(f"{server.url}/metrics").text)
    for width in (400, 1200):
        set_width(browser, width)
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        browser.save_screenshot(str(tmp_path / f"page-{width}.png"))
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [1200, 400], ids=["desk", "phone"])
def test_edit_with_a_brush(server: HttpServer, browser: webdriver.Chrome, tmp_path: Path, width: int) -> None:
    # A page that declares no width, such as an empty one, gets the width of a desktop on phones.
    browser.get(server.url)
    set_width(browser, width)
    find = browser.find_element

    def recent() -> list[WebElement]:
        return browser.find_elements(By.CSS_SELECTOR, "#recent img")

    def drawn_image(prompt: str) -> NDArray[np.int16]:
        field = find(By.ID, "prompt")
        field.clear()
        field.send_keys(prompt)
        find(By.ID, "go").click()
        until(lambda: find(By.ID, "told").text.startswith("done in "))
        content = str(find(By.ID, "image").get_attribute("src")).partition(",")[2]
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))).astype(np.int16)

    def drawn_mask() -> NDArray[np.bool_]:
        """Return the mask that the browser would send."""
        script = "const c = document.getElementById('mask'); return c.toDataURL('image/png')"
        content = browser.execute_script(script).partition(",")[2]
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))).convert("RGBA"))[..., 3] >= 128

    def stroke(start: float, end: float) -> None:
        """Drag across the image between two fractions of its width."""
        mask = find(By.ID, "mask")
        width = mask.size["width"]
        chain = ActionChains(browser).move_to_element_with_offset(mask, round((start - 0.5) * width), 0)
        chain.click_and_hold().move_by_offset(round((end - start) * width), 0).release().perform()

    until(lambda: find(By.ID, "status").text == "ready")
    browser.execute_script("document.getElementById('size').value = '64x32'")
    n_before = len(recent())
    first = drawn_image("a lamp")
    tops = browser.execute_script(TOPS)
    until(lambda: len(recent()) > n_before)
    assert browser.execute_script(TOPS) == tops, "no control moves from under the pointer as the server tells its state"
    find(By.ID, "edit-drawn").click()
    until(lambda: find(By.ID, "mask").is_displayed())
    stroke(0.2, 0.8)
    assert drawn_mask()[16, 16:48].all()
    find(By.ID, "erase").click()
    stroke(0.6, 0.8)
    mask = drawn_mask()
    assert mask[16, 16:28].all()
    assert not mask[16, 40:].any()
    browser.save_screenshot(str(tmp_path / "brush.png"))
    second = drawn_image("a red hat")
    assert second.shape == first.shape == (32, 64, 3)
    changed = np.abs(second - first).max(axis=-1) > 0
    assert changed[mask].mean() > 0.5
    assert not changed[~mask].any(), "outside the mask are the image's own pixels"
    # For a file whose size the model does not support, the page shows the server's message.
    Image.new("RGB", (33, 32)).save(tmp_path / "odd.png")
    find(By.ID, "file").send_keys(str(tmp_path / "odd.png"))
    until(lambda: find(By.ID, "told").text == "")
    find(By.ID, "go").click()
    until(lambda: "image is 33x32" in find(By.ID, "told").text)
    find(By.ID, "no-edit").click()
    assert not find(By.ID, "mask").is_displayed()
    assert drawn_image("a lamp").shape == (32, 64, 3)
    (tmp_path / "text.png").write_text("no image")
    find(By.ID, "file").send_keys(str(tmp_path / "text.png"))
    until(lambda: "is no image" in find(By.ID, "told").text)


def test_new_images_follow_several_others(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """With a model that takes references: without a painted mask, the images that were chosen are references."""
    settings: dict[str, Any] = {"guidance_scale": 1.0, "num_inference_steps": 2, "max_sequence_length": 16}
    model = save_tiny(tmp_path / "klein", tiny_klein(), **settings, resolutions=["64x64"])
    pictures = [image_of(Resolution(64, 64), 1), image_of(Resolution(96, 64), 2)]
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for path, picture in zip(paths, pictures, strict=True):
        Image.fromarray(picture).save(path)
    with HttpServer(model, tmp_path / "workspace", "--slo-scale", "1000") as server:
        browser.get(server.url)
        set_width(browser, 1200)
        find = browser.find_element
        until(lambda: find(By.ID, "status").text == "ready")
        find(By.ID, "file").send_keys("\n".join(map(str, paths)))
        until(lambda: find(By.ID, "others").text == "Beside it: 1.png")
        assert "or nothing for a new image that follows this one" in find(By.ID, "edit").text

        def drawn_image() -> NDArray[np.int16]:
            find(By.ID, "go").click()
            until(lambda: find(By.ID, "told").text.startswith("done in "))
            content = str(find(By.ID, "image").get_attribute("src")).partition(",")[2]
            return np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))).astype(np.int16)

        for name, value in (("prompt", "a cat"), ("seed", "3")):
            find(By.ID, name).clear()
            find(By.ID, name).send_keys(value)
        references = tuple(CROPPED.fitted(picture, 16) for picture in pictures)
        request = Request(0, "a cat", Resolution(64, 64), 2, 1.0, seed=3, references=references)
        expected = np.asarray(plain_image(tiny_klein(), request, max_sequence_length=16), dtype=np.int16)
        assert np.abs(drawn_image() - expected).max() <= 1
        mask = find(By.ID, "mask")
        # Through the middles of latents, which have 16 pixels on a side.
        width = "const brush = document.getElementById('width'); brush.value = 80;"
        browser.execute_script(f"{width} brush.dispatchEvent(new Event('input'))")
        start = -round(0.3 * mask.size["width"]), round(0.117 * mask.size["height"])
        chain = ActionChains(browser).move_to_element_with_offset(mask, *start)
        chain.click_and_hold().move_by_offset(round(0.2 * mask.size["width"]), 0).release().perform()
        browser.save_screenshot(str(tmp_path / "references.png"))
        kept = (drawn_image() == pictures[0]).all(axis=-1)
        assert kept[:, 48:].all()
        assert not kept.all()
