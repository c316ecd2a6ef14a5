import pytest
import torch
from PIL import Image

from patchedserve.data.prompts.captions import load_prompts
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.eval.metrics.psnr import psnr
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.preview import Preview
from patchedserve.serving.engine.watch import Watch
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.scheduling.policies import get_policy

NUMBER = 8


def drawn(model: ServedModel, preview: Preview, num_steps: int) -> tuple[InMemory, list[Image.Image]]:
    """Serve eight requests of two sizes; return the collector and a partial image of each request."""
    collector, partials = InMemory(keep_images=True, keep_latents=True), []
    engine = Engine(model, get_policy("continuous"), collector=collector, preview=preview)
    for number, prompt in zip(range(NUMBER), load_prompts(), strict=False):
        watch = Watch(num_partials=1, on_partial=lambda index, image: partials.append(image))
        size = (Resolution(128, 128), Resolution(192, 128))[number % 2]
        engine.submit(Request(number, prompt, size, num_steps, seed=number), watch=watch)
    engine.close()
    engine.run()
    assert not engine.callback_failures.count
    assert len(partials) == NUMBER
    return collector, partials


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", ["emoji-xl", "emoji-3"])
def test_preview_is_close_to_the_decoded_image(name: str) -> None:
    model, warm, learnt = load_model(name, dtype="float32"), Preview(), Preview()
    drawn(model, warm, 4)
    found, partials = drawn(model, learnt, 12)
    for number, image in found.images.items():
        # One preview has learnt from the rough images of a warm-up, the other from these very images.
        for preview in (warm, learnt):
            shown = preview.draw(found.latents[number])
            assert shown is not None
            assert shown.size == image.size
            assert psnr(shown, image) >= 18
            assert psnr(shown, image) > psnr(found.images[(number + 2) % NUMBER], image) + 5
    assert {image.size for image in partials} == {(128, 128), (192, 128)}


def test_preview_is_none_until_enough_images_are_known() -> None:
    preview, red = Preview(), Image.new("RGB", (128, 128), "red")
    for _ in range(4):
        assert preview.draw(torch.zeros(1, 4, 16, 16)) is None
        preview.learn(torch.randn(1, 4, 16, 16), red)
    shown = preview.draw(torch.randn(1, 4, 16, 24))
    assert shown is not None
    assert shown.size == (192, 128)
    assert shown.getpixel((100, 50)) == (255, 0, 0)
    assert preview.draw(torch.full((1, 4, 16, 24), torch.inf)) is None, "a black image would be shown"
