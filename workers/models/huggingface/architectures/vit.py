"""ViT: a transformer that classifies images by a class token."""

from __future__ import annotations

from torch import Tensor, nn

from workers.models.huggingface.architecture import Architecture, Model, SourceLayer, numbered
from workers.models.huggingface.library import Config


class ClassTokenHead(nn.Module):
    """Final norm and logits float[B, classes] from the class token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.classifier(self.norm(hidden)[:, 0, :])


def _layers(model: Model) -> tuple[SourceLayer, ...]:
    vit, config = model.module, model.config
    return (
        SourceLayer("embed", lambda: vit.ViTEmbeddings(config), {"": "vit.embeddings"}),
        *numbered(
            config.num_hidden_layers,
            lambda index: vit.ViTLayer(config),
            lambda index: {"": f"vit.layers.{index}"},
        ),
        SourceLayer(
            "head", lambda: ClassTokenHead(config), {"norm": "vit.layernorm", "classifier": "classifier"}
        ),
    )


ARCHITECTURE = Architecture({"ViTForImageClassification": ("vit", "image-classification")}, _layers)
