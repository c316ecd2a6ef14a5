"""Download of models from the hub: first their configuration, and their weights at loading. No torch until then."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...data.errors import RunError, UsageError
from ...data.models.bundled import GENERATORS
from .checkpoint import INDEX_FILE, weight_components

_CONFIGURATION = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of a model other than its weights, as diffusers fetches them for single-file checkpoints."""


def fetch_configuration(hub_id: str, revision: str | None) -> Path:
    """Fetch everything but the weights of a repository, and return its local folder. Weights fetched before are kept.

    Raises:
        UsageError: there is no such repository or revision.
        RunError: it is gated, or the hub cannot be reached and its cache has nothing.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache

    with _explain_refusals(hub_id, revision):
        if not isinstance(try_to_load_from_cache(hub_id, INDEX_FILE, revision=revision), str):
            # Without a connection this fails at once, whereas downloads are retried for 20 seconds.
            HfApi().model_info(hub_id, revision=revision, timeout=10)
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(_CONFIGURATION)))


def fetch_weights(
    hub_id: str, revision: str | None, folder: Path, index: dict[str, Any], variants: Sequence[str | None]
) -> Path:
    """Fetch the weights of a repository, too, and return its local folder.

    Args:
        hub_id: id of the repository.
        revision: revision of the repository.
        folder: result of `fetch_configuration`.
        index: its `model_index.json`.
        variants: variants in order of preference, such as `fp16`, of which the first complete one is fetched; None
            stands for files without a variant.

    Raises what `fetch_configuration` raises.
    """
    import diffusers
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    with _explain_refusals(hub_id, revision):
        components = weight_components(index)
        here = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
        try:
            there = [file.path for file in get_cached_repo_tree(hub_id, revision=revision)]
        except CachedRepoTreeNotFoundError:  # another program has filled the cache
            there = here
        # Weights that were downloaded before are used even if they have more bits than requested.
        complete = _complete_variants(here, components, variants) or _complete_variants(there, components, variants)
        pipeline, variant = getattr(diffusers, index["_class_name"]), next(iter(complete), None)
        return Path(pipeline.download(hub_id, revision=revision, use_safetensors=True, variant=variant))


def _complete_variants(
    files: Sequence[str], components: Iterable[str], variants: Sequence[str | None]
) -> list[str | None]:
    """Return the variants for which all components have weights."""

    def has(component: str, variant: str | None) -> bool:
        mark = "" if variant is None else rf"\.{variant}"
        weights = re.compile(
            rf"{component}/(diffusion_pytorch_)?model({mark}(-\d+-of-\d+)?|-\d+-of-\d+{mark})\.safetensors"
        )
        return any(weights.fullmatch(name) for name in files)

    return [each for each in variants if all(has(component, each) for component in components)]


@contextmanager
def _explain_refusals(hub_id: str, revision: str | None) -> Iterator[None]:
    """Turn errors of the hub and its client into one-line errors that say what to do."""
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except RevisionNotFoundError as error:
        raise UsageError(f"model {hub_id} has no revision {revision}: a branch, tag or commit is expected") from error
    except GatedRepoError as error:
        raise RunError(
            f"model {hub_id} is gated: accept its terms on the hub, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(f"unknown model {hub_id!r}: no such bundled model, directory or hub repository") from error
    except Exception as error:  # the hub client's own errors, and those of whatever HTTP library it uses
        offline = " (HF_HUB_OFFLINE is set)" if HF_HUB_OFFLINE else ""
        raise RunError(
            f"model {hub_id} cannot be fetched from the hub{offline}: download it on a machine with access "
            f"(`hf download {hub_id} --local-dir DIR`) and pass the directory, or use a bundled model "
            f"({', '.join(GENERATORS)})"
        ) from error
