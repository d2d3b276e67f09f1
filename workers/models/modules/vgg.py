"""Layers of `vgg`: a convolution with what follows it, and the dense layers."""

from __future__ import annotations

from torch import Tensor, nn


class VggConvolution(nn.Module):
    """3 x 3 convolution and ReLU, then, at the end of a stage, maximum over 2 x 2 pixels."""

    def __init__(self, *, inputs: int, outputs: int, pooled: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
        self.activation = nn.ReLU()
        self.pooling = nn.MaxPool2d(2) if pooled else nn.Identity()
        # He et al., "Delving Deep into Rectifiers" (2015), eq. 14.
        nn.init.kaiming_normal_(self.convolution.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.convolution.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """images: float[B, C, H, W] -> float[B, outputs, H, W], or half of H and W."""
        return self.pooling(self.activation(self.convolution(images)))


class VggDense(nn.Module):
    """Linear map, ReLU and dropout; images are flattened first."""

    def __init__(self, *, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.activation = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        _initialise(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, ...] -> float[B, outputs]."""
        return self.dropout(self.activation(self.linear(x.flatten(1))))


class VggHead(nn.Module):
    """Linear map to the classes."""

    def __init__(self, *, inputs: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(inputs, classes)
        _initialise(self.classifier)

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, inputs] -> logits float[B, classes]."""
        return self.classifier(x)


def _initialise(linear: nn.Linear) -> None:
    nn.init.normal_(linear.weight, std=0.01)
    nn.init.zeros_(linear.bias)
