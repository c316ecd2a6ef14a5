"""CLIP as a judge: embeddings of any `CLIPModel`, retrieval recall, zero-shot classes, CLIP score.

The functions work on embeddings of length 1, so they are the same for the bundled `emoji-clip` and for
`openai/clip-vit-base-patch16`. Definitions: Radford et al. 2021, section 3.1 (zero-shot with averaged templates) and
Hessel et al. 2021 (CLIP score).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from ...data.errors import RunError, UsageError
from ...data.models.bundled import BUNDLED, bundled_model_path
from .images import AnyImage, to_pil

DEFAULT_CLIP = "emoji-clip"
TEMPLATES = ("{}", "a photo of {}", "a picture of {}")  # no article, so that any name fits


class Clip:
    """A CLIP model with its tokenizer and image preprocessing.

    Args:
        model: a transformers `CLIPModel` on the device where it shall run.
        tokenizer: its tokenizer.
        image_processor: its image processor (resize, crop, normalise).
    """

    def __init__(self, model: Any, tokenizer: Any, image_processor: Any) -> None:
        self.model = model.eval()
        self._tokenizer = tokenizer
        self._image_processor = image_processor

    @property
    def device(self) -> torch.device:
        """Device on which the model runs."""
        return self.model.device

    def embed_images(self, images: Sequence[AnyImage], batch_size: int = 64) -> torch.Tensor:
        """Return embeddings (n, d) of length 1, float32 on the CPU. Images may have any sizes."""

        def embed(batch: Sequence[AnyImage]) -> Any:
            pixels = self._image_processor(images=list(map(to_pil, batch)), return_tensors="pt")["pixel_values"]
            return self.model.get_image_features(pixels.to(self.device, self.model.dtype))

        return self._in_batches(images, batch_size, embed)

    def embed_texts(self, texts: Sequence[str], batch_size: int = 256) -> torch.Tensor:
        """Return embeddings (n, d) of length 1, float32 on the CPU. Texts that are too long are truncated."""
        limit = self.model.config.text_config.max_position_embeddings

        def embed(batch: Sequence[str]) -> Any:
            tokens = self._tokenizer(list(batch), padding=True, truncation=True, max_length=limit, return_tensors="pt")
            tokens = tokens.to(self.device)
            return self.model.get_text_features(tokens["input_ids"], attention_mask=tokens["attention_mask"])

        return self._in_batches(texts, batch_size, embed)

    def embed_classes(self, names: Sequence[str], templates: Sequence[str] = TEMPLATES) -> torch.Tensor:
        """Return one embedding (classes, d) of length 1 per name: the mean over templates, each with a "{}" for it.

        Raises:
            UsageError: there is no template, or one has no "{}".
        """
        if not templates or any("{}" not in template for template in templates):
            raise UsageError(f"templates are {list(templates)!r}, but must be texts with {{}} where the name goes")
        texts = [template.format(name) for name in names for template in templates]
        embeddings = self.embed_texts(texts)
        return F.normalize(embeddings.view(len(names), len(templates), -1).mean(1), dim=-1)

    @torch.inference_mode()
    def _in_batches(self, items: Sequence[Any], batch_size: int, embed: Callable[[Sequence[Any]], Any]) -> torch.Tensor:
        parts = [torch.zeros(0, self.model.config.projection_dim)]
        for first in range(0, len(items), batch_size):
            found = embed(items[first : first + batch_size])
            # transformers 5 wraps the projected features in a model output; before, they were the tensor itself.
            features = found if isinstance(found, torch.Tensor) else found.pooler_output
            parts.append(F.normalize(features.float(), dim=-1).cpu())
        return torch.cat(parts)


def load_clip(source: str | Path = DEFAULT_CLIP, device: str | torch.device = "cpu") -> Clip:
    """Load a CLIP model with its processor.

    Args:
        source: a bundled name (`emoji-clip`), a local directory, or a hub id (`openai/clip-vit-base-patch16`).
        device: device on which the model runs.

    Raises:
        RunError: the model cannot be loaded; the message states the reason.
    """
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    path = bundled_model_path(str(source)) if source in BUNDLED else source
    if not Path(path).is_dir() and (source in BUNDLED or Path(path).is_absolute()):
        raise RunError(f"CLIP model {source}: there is no folder {path}")
    had_bars = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        model = CLIPModel.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        # The PIL form, with or without torchvision: the two resize a little differently, and figures must not differ.
        image_processor = CLIPImageProcessorPil.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RunError(f"CLIP model {source} cannot be loaded: {reason}") from error
    finally:
        if had_bars:
            enable_progress_bar()
    return Clip(model.to(device), tokenizer, image_processor)  # type: ignore[arg-type]


def retrieval_recall(queries: torch.Tensor, candidates: torch.Tensor, captions: Sequence[str], k: int = 1) -> float:
    """Return the share of queries with a right candidate among the k nearest; query i and candidate i belong together.

    Args:
        queries: (n, d) of length 1, for example images.
        candidates: (n, d) of length 1, for example their texts.
        captions: n texts; a candidate with the same caption as the query is also right.
        k: number of nearest candidates, 1 to n.

    Raises:
        UsageError: the numbers do not match, or k is out of range.
    """
    count = len(captions)
    if queries.shape != candidates.shape or len(queries) != count or not count:
        raise UsageError(
            f"embeddings are {tuple(queries.shape)} and {tuple(candidates.shape)} with {count} captions, "
            "but there must be as many of each, at least one"
        )
    if not 1 <= k <= count:
        raise UsageError(f"k is {k}, but it must be 1 to {count}")
    labels = _labels(captions)
    nearest = (queries @ candidates.T).topk(k, dim=1).indices
    return float((labels[nearest] == labels[:, None]).any(dim=1).float().mean())


def zero_shot(images: torch.Tensor, classes: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Return indices (n, k) of the nearest classes of each image, the nearest first.

    Args:
        images: (n, d) of length 1.
        classes: (classes, d) of length 1, as `Clip.embed_classes` returns them.
        k: number of nearest classes, 1 to the number of classes.

    Raises:
        UsageError: k is out of range.
    """
    if not 1 <= k <= len(classes):
        raise UsageError(f"k is {k}, but it must be 1 to {len(classes)}")
    return (images @ classes.T).topk(k, dim=1).indices


def clip_scores(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """Return 100 max(cosine, 0) of each pair in float64, (n,), as in torchmetrics; embeddings (n, d) have length 1.

    Raises:
        UsageError: the numbers do not match, or there is no pair.
    """
    if images.shape != texts.shape or not len(images):
        raise UsageError(
            f"embeddings are {tuple(images.shape)} and {tuple(texts.shape)}, but must be equal and not empty"
        )
    return 100 * (images * texts).sum(-1).clamp(min=0).double()


def _labels(captions: Sequence[str]) -> torch.Tensor:
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(caption, len(numbers)) for caption in captions])
