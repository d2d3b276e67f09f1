"""ResNet: a residual network of convolutions that classifies images."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from workers.models.huggingface.architecture import Architecture, Model, SourceLayer, numbered
from workers.models.huggingface.library import Config


class ResNetHead(nn.Module):
    """Mean over the image and logits float[B, classes]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.pooler = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(config.hidden_sizes[-1], config.num_labels))

    def forward(self, features: Tensor) -> Tensor:
        return self.classifier(self.pooler(features))


def _layers(model: Model) -> tuple[SourceLayer, ...]:
    resnet, config = model.module, model.config
    widths = (config.embedding_size, *config.hidden_sizes)
    places = [(stage, depth) for stage, depths in enumerate(config.depths) for depth in range(depths)]

    def block(number: int) -> nn.Module:
        stage, depth = places[number]
        options: dict[str, Any] = {"activation": config.hidden_act}
        if depth == 0:
            options["stride"] = 2 if stage > 0 or config.downsample_in_first_stage else 1
        kind = resnet.ResNetBasicLayer
        if config.layer_type == "bottleneck":
            kind = resnet.ResNetBottleNeckLayer
            options["downsample_in_bottleneck"] = depth == 0 and config.downsample_in_bottleneck
        return kind(widths[stage + (depth > 0)], widths[stage + 1], **options)

    def source(number: int) -> dict[str, str]:
        stage, depth = places[number]
        return {"": f"resnet.encoder.stages.{stage}.layers.{depth}"}

    return (
        SourceLayer("embed", lambda: resnet.ResNetEmbeddings(config), {"": "resnet.embedder"}),
        *numbered(len(places), block, source),
        SourceLayer("head", lambda: ResNetHead(config), {"classifier": "classifier"}),
    )


ARCHITECTURE = Architecture({"ResNetForImageClassification": ("resnet", "image-classification")}, _layers)
