"""Makes what finetune-vit.toml trains: a small ViT as transformers saves it, and handwritten digits as a folder of
images. Beside the ViT a ConvNeXt-V2, which the same spec trains with `--set model.path=runs/small-convnext`.

    python examples/small_vision.py
    freshet train examples/finetune-vit.toml
    freshet export runs/finetune-vit --format huggingface --out runs/vit-that-reads

The digits are scikit-learn's. The models' weights are random but for the seed. All lies in runs/small-vit,
runs/small-convnext and runs/digits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from transformers import (
    ConvNextV2Config,
    ConvNextV2ForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

SIDE, CLASSES, BRIGHTEST = 16, 10, 16
"""Side of the models' images in pixels, digits, and the greatest pixel of scikit-learn's images."""
HELD_OUT = 5
"""One image in so many is held out."""


def write_digits(folder: Path) -> int:
    """Write `train/CLASS/NUMBER.png` and `validation/CLASS/NUMBER.png`; returns how many there are."""
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    images = np.round(pixels.reshape(-1, 8, 8) * (255 / BRIGHTEST)).astype(np.uint8)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        file = folder / ("train" if number % HELD_OUT else "validation") / str(label) / f"{number:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return len(images)


def main(folder: Path = Path("runs")) -> None:
    torch.manual_seed(0)
    vit = ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        image_size=SIDE,
        patch_size=4,
        num_channels=1,
        num_labels=CLASSES,  # pyright: ignore[reportCallIssue]
    )
    ViTForImageClassification(vit).save_pretrained(folder / "small-vit")
    ViTImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=[0.5], image_std=[0.5]
    ).save_pretrained(folder / "small-vit")
    convnext = ConvNextV2Config(
        hidden_sizes=[32, 64],
        depths=[2, 2],
        num_stages=2,
        patch_size=2,
        image_size=SIDE,
        num_channels=1,
        num_labels=CLASSES,  # pyright: ignore[reportCallIssue]
    )
    ConvNextV2ForImageClassification(convnext).save_pretrained(folder / "small-convnext")
    ConvNextImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_pct=1.0, image_mean=[0.5], image_std=[0.5]
    ).save_pretrained(folder / "small-convnext")
    count = write_digits(folder / "digits")
    print(
        f"wrote {folder / 'small-vit'}, {folder / 'small-convnext'} and {folder / 'digits'}: {count:,} images"
    )


if __name__ == "__main__":
    main()
