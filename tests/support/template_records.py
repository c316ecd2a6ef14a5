"""Edits with templates, models with their records, and an engine that serves them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchedserve.data.edits import TemplateSpec
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.templates import Keep
from patchedserve.serving.editing.templates import TemplateStore
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.run_result import RunResult
from patchedserve.serving.models.build import build_model
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.scheduling.policies import get_policy

from .edits import edit_request
from .plain import short_texts

SMALL, LARGE, WIDE = Resolution(64, 64), Resolution(128, 128), Resolution(96, 64)
TEMPLATE = TemplateSpec("a picture", 5)


def build_tiny(pipe: Any, options: EngineOptions | None = None) -> ServedModel:
    """Build a model with short texts."""
    return build_model(pipe, name="tiny", options=options, defaults=ModelDefaults(**short_texts(pipe)))


def model_with(pipe: Any, folder: Path, requests: Sequence[Request] = (), keep: Keep = "all") -> ServedModel:
    """Build a model with the records of these edits' templates."""
    return with_records(build_tiny(pipe), TemplateStore(folder), requests, keep)


def with_records(
    model: ServedModel, store: TemplateStore, requests: Sequence[Request] = (), keep: Keep = "all"
) -> ServedModel:
    """Record these edits' templates in the store, which the model then reads whatever the mask; returns the model."""
    model.reuse.use_keep(keep)
    model.reuse.store, model.reuse.masked_up_to = store, 1.0
    for request in requests:
        key = some(model.reuse.key_of(request))
        if store.find(key, model.device) is None:
            store.add(key, model.reuse.recorded(request), model.device)
    return model


def serve(model: ServedModel, requests: Sequence[Request]) -> RunResult:
    engine = Engine(
        model, get_policy("continuous"), max_batch_size=8, collector=InMemory(keep_images=True, keep_latents=True)
    )
    for request in requests:
        engine.submit(request)
    engine.close()
    result = engine.run()
    assert [record.reason for record in result.records] == [None] * len(requests)
    return result


def some(value: Any) -> Any:
    assert value is not None
    return value


def edits() -> list[Request]:
    """Return three edits of a template, whose masks leave latents of 16 pixels a side, as of FLUX.2, on both sides."""
    return [
        edit_request(0, SMALL, "left", template=TEMPLATE),
        edit_request(1, LARGE, "ellipse", 0.5, num_steps=9, template=TEMPLATE),
        edit_request(2, WIDE, "left", num_steps=4, guidance_scale=1.0, template=TEMPLATE),
    ]
