"""The cache predictor's file: read back unchanged, made for another model, or damaged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from patchedserve.data.errors import UsageError
from patchedserve.kernels.forest import forest_predict
from patchedserve.kernels.forest_tables import FlatForest
from patchedserve.training.cache.fitting import FitSettings, fit_cache_predictor
from patchedserve.training.cache.predictor import CachePredictor
from patchedserve.training.cache.samples import BlockSamples

from ...support.block_profiles import FACTS, THRESHOLD, samples_of, write_profile


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> BlockSamples:
    return samples_of(write_profile(tmp_path_factory.mktemp("profile") / "blocks.parquet"))


@pytest.fixture(scope="module")
def predictor(samples: BlockSamples) -> CachePredictor:
    return fit_cache_predictor(samples, FACTS, FitSettings(THRESHOLD))


@pytest.fixture
def saved(predictor: CachePredictor, tmp_path: Path) -> Path:
    predictor.save(tmp_path / "new" / "cache.safetensors")
    return tmp_path / "new" / "cache.safetensors"


def test_predictor_round_trips_through_a_file(predictor: CachePredictor, saved: Path, samples: BlockSamples) -> None:
    again = CachePredictor.load(saved, expect=FACTS)
    assert replace(again, forest=predictor.forest) == predictor
    features = torch.from_numpy(samples.features)
    assert torch.equal(again.may_reuse(features), predictor.may_reuse(features))
    assert again.to("cpu").facts == FACTS
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert saved.stat().st_size < 200_000


@pytest.mark.exhaustive
@pytest.mark.slow
def test_loading_a_file_needs_no_scikit_learn(saved: Path, repository: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from patchedserve.training.cache.predictor import CachePredictor; "
        f"CachePredictor.load({str(saved)!r}); sys.exit('sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=repository.parent, check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "another"}, "is for other files of the model emoji-xl"),
        ({"model": "emoji-3", "fingerprint": "another"}, "is for the model emoji-xl, but emoji-3 is served"),
        ({"scheduler": "DDIMScheduler"}, "but DDIMScheduler is served"),
        ({"patch_size": 4}, "is for patch size 8, but 4 is served; give --cache-patch-size 8"),
        ({"blocks": ("down0", "mid")}, "is for blocks down0, mid, up0, but down0, mid is served"),
    ],
)
def test_predictors_of_other_models_are_refused(saved: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        CachePredictor.load(saved, expect=replace(FACTS, **change))
    assert str(caught.value).startswith(str(saved))
    assert "\n" not in str(caught.value)


def test_truncated_and_missing_files(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    for length in (0, 7, 8, 100, len(content) // 2, len(content) - 1):
        saved.write_bytes(content[:length])
        with pytest.raises(UsageError, match="truncated, damaged or no safetensors file"):
            CachePredictor.load(saved)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match=r"there is no cache predictor .*; train one with: psctl train-predictor"):
            CachePredictor.load(path)


def test_flipped_bits(saved: Path) -> None:
    content = saved.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    generator = np.random.default_rng(0)
    for place in [start, len(content) - 1, *generator.integers(start, len(content), 10)]:
        broken = bytearray(content)
        broken[place] ^= 1
        saved.write_bytes(broken)
        with pytest.raises(UsageError, match="its checksum is wrong"):
            CachePredictor.load(saved)


def test_edited_heads(saved: Path) -> None:
    content = saved.read_bytes()
    for old, new in ((b"0.01", b"0.09"), (b"emoji-xl", b"emoji-xs"), (b"log10", b"log11")):
        assert old in content
        saved.write_bytes(content.replace(old, new, 1))
        with pytest.raises(UsageError, match="its checksum is wrong"):
            CachePredictor.load(saved)


def rewritten(saved: Path, content: dict[str, Any], arrays: dict[str, torch.Tensor], **head: str) -> None:
    """Write the file again with changes and a correct checksum."""
    from patchedserve.training.cache.predictor import _checksum

    with safe_open(saved, "pt") as file:
        old = file.metadata()
    text = json.dumps(json.loads(old["psctl.content"]) | content)
    arrays = load_file(saved) | arrays
    head = old | {"psctl.content": text, "psctl.sha256": _checksum(text, arrays)} | head
    save_file(arrays, saved, head)


@pytest.mark.parametrize(
    ("content", "arrays", "head", "message"),
    [
        ({"features": ["input_mse"]}, {}, {}, r"was trained on the features \['input_mse'\], but this psctl uses"),
        ({"input_mse_floor": 1e-3}, {}, {}, "was trained on the features"),
        ({}, {}, {"psctl.kind": "latency predictor"}, "is a safetensors file, but no cache predictor"),
        ({}, {}, {"psctl.format": "1"}, "is of format 1, but this psctl reads format 2"),
        ({"blocks": "mid"}, {}, {}, "blocks is 'mid', but it must be a list"),
        ({"threshold": "low"}, {}, {}, "threshold is 'low', but it must be a number"),
        ({"min_confidence": None}, {}, {}, "min_confidence is None"),
        ({"max_lag": 0}, {}, {}, "max_lag is 0, but it must be at least 1"),
        ({}, {"feature": torch.full((5,), 7, dtype=torch.int32)}, {}, "is damaged: .* of the forest is"),
        ({}, {"roots": torch.zeros(0, dtype=torch.int32)}, {}, "the roots of the forest must ascend"),
        ({}, {"more": torch.zeros(1)}, {}, "is damaged"),
    ],
)
def test_files_of_other_programs_are_refused(
    saved: Path, content: dict[str, Any], arrays: dict[str, torch.Tensor], head: dict[str, str], message: str
) -> None:
    rewritten(saved, {}, {})
    CachePredictor.load(saved)
    rewritten(saved, content, arrays, **head)
    with pytest.raises(UsageError, match=message) as caught:
        CachePredictor.load(saved)
    assert "\n" not in str(caught.value)


def test_other_safetensors_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="is a safetensors file, but no cache predictor"):
        CachePredictor.load(tmp_path / "a.safetensors")


def test_decisions_equal_those_of_the_kernel(predictor: CachePredictor, samples: BlockSamples) -> None:
    features = torch.from_numpy(samples.features[:500])
    assert torch.equal(predictor.may_reuse(features, kernels="torch"), forest_predict(features, predictor.forest))
    with pytest.raises(ValueError, match=r"must be \(rows, 5\)"):
        predictor.may_reuse(features[:, :4])
    assert isinstance(predictor.forest, FlatForest)
