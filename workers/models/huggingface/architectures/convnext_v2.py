"""ConvNeXt-V2: a network of convolutions with response normalization that classifies images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.models.huggingface.architecture import Architecture, Model, SourceLayer, numbered
from workers.models.huggingface.library import Config


class ConvNextBlock(nn.Module):
    """A block; the first of a stage halves the image first."""

    def __init__(self, downsampling: nn.ModuleList | None, block: nn.Module) -> None:
        super().__init__()
        if downsampling is not None:
            self.downsampling = downsampling
        self.block = block

    def forward(self, features: Tensor) -> Tensor:
        for part in getattr(self, "downsampling", ()):
            features = part(features)
        return self.block(features)


class ConvNextHead(nn.Module):
    """Mean over the image, norm, and logits float[B, classes]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_sizes[-1], eps=config.layer_norm_eps)
        self.classifier = nn.Linear(config.hidden_sizes[-1], config.num_labels)

    def forward(self, features: Tensor) -> Tensor:
        return self.classifier(self.norm(features.mean([-2, -1])))


def _layers(model: Model) -> tuple[SourceLayer, ...]:
    convnext, config = model.module, model.config
    rates = torch.linspace(0, config.drop_path_rate, sum(config.depths), device="cpu").tolist()
    places = [(stage, depth) for stage, depths in enumerate(config.depths) for depth in range(depths)]

    def block(number: int) -> nn.Module:
        (stage, depth), downsampling = places[number], None
        width = config.hidden_sizes[stage]
        if depth == 0 and stage > 0:
            before = config.hidden_sizes[stage - 1]
            norm = convnext.ConvNextV2LayerNorm(before, eps=1e-6, data_format="channels_first")
            downsampling = nn.ModuleList([norm, nn.Conv2d(before, width, kernel_size=2, stride=2)])
        return ConvNextBlock(downsampling, convnext.ConvNextV2Layer(config, width, rates[number]))

    def source(number: int) -> dict[str, str]:
        stage, depth = places[number]
        inside = f"convnextv2.encoder.stages.{stage}"
        return {"downsampling": f"{inside}.downsampling_layer", "block": f"{inside}.layers.{depth}"}

    return (
        SourceLayer("embed", lambda: convnext.ConvNextV2Embeddings(config), {"": "convnextv2.embeddings"}),
        *numbered(len(places), block, source),
        SourceLayer(
            "head",
            lambda: ConvNextHead(config),
            {"norm": "convnextv2.layernorm", "classifier": "classifier"},
        ),
    )


ARCHITECTURE = Architecture(
    {"ConvNextV2ForImageClassification": ("convnextv2", "image-classification")}, _layers
)
