"""Records of generations: edits of an image reuse the passes that drew it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchedserve.data.edits import EditSpec, TemplateSpec
from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.templates import Keep
from patchedserve.serving.editing.templates import TemplateStore
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import TemplateTiers
from patchedserve.serving.scheduling.policies import get_policy

from ...support.edits import mask_of
from ...support.patched_models import relative_error
from ...support.plain import plain_latents, short_texts
from ...support.template_records import LARGE, WIDE, build_tiny, serve, some
from .test_exact import pipeline


def drawn_and_recorded(model: ServedModel, folder: Path, request: Request) -> tuple[Request, Any]:
    """Serve a request and record it; return an edit of the whole image that was drawn, and the image's latents."""
    spool = folder / "spool"
    spool.mkdir(parents=True)
    model.reuse.start_trajectory(request, spool)
    engine = Engine(
        model, get_policy("continuous"), collector=InMemory(keep_images=True, keep_latents=True)
    )  # fmt: skip
    engine.submit(request)
    engine.submit(Request(7, "another", WIDE, 3, 2.0))
    engine.close()
    result = engine.run()
    pixels, model.reuse.store = np.asarray(result.images[0]), TemplateStore(folder / "records")
    model.reuse.end_trajectory(request, pixels, result.latents[0], model.reuse.store)
    assert model.reuse.trajectories == {}
    edit = EditSpec(pixels, np.ones(pixels.shape[:2], bool), template=TemplateSpec(kind="trajectory"))
    return replace(request, edit=edit), result.latents[0]


@pytest.mark.product(most=2)
@pytest.mark.parametrize(
    ("family", "sampler", "keep"),
    [
        ("sdxl", "euler", "all"),
        ("sdxl", "dpm++", "kv"),
        ("sdxl", "euler-ancestral", "outputs"),
        *((family, None, "all") for family in ("sd", "sd3", "flux")),
        ("sd3", None, "outputs"),
    ],
)
def test_edit_with_the_generated_prompt_equals_the_image(
    family: str, sampler: str | None, keep: Keep, tmp_path: Path
) -> None:
    pipe, request = pipeline(family, sampler), Request(0, "a red hat", LARGE, 20, 4.0, seed=3)
    model = build_tiny(pipe)
    model.reuse.use_keep(keep)
    model.reuse.masked_up_to = 1.0
    whole, latents = drawn_and_recorded(model, tmp_path, request)
    assert relative_error([latents], [plain_latents(pipe, request, **short_texts(pipe))[None]]) <= 1e-3
    # A new store stands for another process, which reads the files step by step.
    model.reuse.store = TemplateStore(tmp_path / "records", TemplateTiers(memory_mb=0))
    masks = [mask_of(LARGE, kind) for kind in ("box", "line", "speckles", "all")]
    edits = [replace(whole, request_id=index, edit=replace(some(whole.edit), mask=m)) for index, m in enumerate(masks)]
    tail = replace(edits[0], request_id=9, prompt="a dog", edit=replace(some(edits[0].edit), strength=0.5))
    prepared = model.prepare(tail)
    assert prepared.template is not None
    known = some(prepared.known_area)
    outside = (known.weights == 0).expand_as(known.clean)
    result = serve(model, [*edits, replace(edits[0], request_id=8, prompt="a dog"), tail])
    for edit in edits:
        assert relative_error([result.latents[edit.request_id]], [latents]) <= 1e-3
    for number in (8, 9):
        assert torch.equal(result.latents[number][outside], latents[outside])
        assert relative_error([result.latents[number]], [latents]) > 1e-2


def test_record_of_a_generation_is_bound_to_image_steps_and_guidance(tmp_path: Path) -> None:
    model = build_tiny(pipeline("sdxl"))
    whole, _ = drawn_and_recorded(model, tmp_path, Request(0, "a red hat", LARGE, 4, 4.0, seed=3))
    edit = replace(some(whole.edit), mask=mask_of(LARGE))
    model.reuse.masked_up_to = 1.0
    same = [replace(whole, edit=edit), replace(whole, edit=edit, prompt="a dog", seed=5, negative_prompt="grey")]
    assert all(model.prepare(each).template is not None for each in same)
    others = [
        replace(whole, edit=edit, num_inference_steps=5),
        replace(whole, edit=edit, guidance_scale=3.0),
        replace(whole, edit=replace(edit, image=edit.image ^ 1)),
        replace(whole, edit=replace(edit, template=TemplateSpec())),
    ]
    for other in others:
        prepared = model.prepare(other)
        assert prepared.template is None
        assert some(prepared.known_area).trajectory is None
    for other in others[:3]:
        with pytest.raises(UsageError, match="there is no record of the image's generation"):
            model.reuse.use_template(other, tmp_path, lambda count: None)
    assert not model.reuse.use_template(same[0], tmp_path, lambda count: None)
    with pytest.raises(UsageError, match="72x64: for a record of the image, width and height must be multiples of 32"):
        model.reuse.start_trajectory(Request(0, "a", Resolution(72, 64), 4), tmp_path)
