"""Refuses parameters and modules that no layer may hold, when the layer's size is found: by name, with the way out."""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.parameter import is_lazy

from workers.process.torch_modes import check_modes_kept
from workers.protocol.errors import JobError


class Refusals:
    """Looks at the built layers of one model, one after the other."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[nn.Parameter], str, str]] = {}
        """Identity of a parameter -> itself, its layer, its name there."""

    def check(self, layer: str, module: nn.Module) -> None:
        """Look at the module that the builder of `layer` made.

        Raises:
            JobError: it cannot be trained here as PyTorch would train it.
        """
        check_modes_kept(f"the builder of layer {layer!r}")
        for name, part in module.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
                raise JobError(
                    f"{name or type(part).__name__} of layer {layer!r} has sparse = True: ranks exchange dense"
                    " gradients, and the optimizers here take no others: set sparse=False"
                )
        for name, parameter in module.named_parameters():
            self._check_parameter(layer, name, parameter)

    def _check_parameter(self, layer: str, name: str, parameter: nn.Parameter) -> None:
        what = f"parameter {name} of layer {layer!r}"
        if is_lazy(parameter):
            raise JobError(
                f"{what} has no shape before the first pass (a Lazy module): give its module the sizes of its inputs,"
                " as in nn.Linear(64, 10)"
            )
        if parameter.is_complex():
            raise JobError(
                f"{what} is complex: hold its real and imaginary parts as one real parameter [..., 2], and make the"
                " complex tensor of it in the forward pass with torch.view_as_complex"
            )
        if parameter.requires_grad and getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise JobError(
                f"{what} has a hook that runs when its gradient was added up"
                " (register_post_accumulate_grad_hook): here gradients are added up across ranks after the pass. Use"
                " register_hook, which sees the gradient of each microbatch"
            )
        known = self._known.get(id(parameter))
        if known is not None and known[0]() is parameter:
            other = f"ParameterRef({known[1]!r}, {known[2]!r})"
            raise JobError(
                f"layers {known[1]!r} and {layer!r} hold one and the same parameter ({known[2]}, {name}), but each"
                " layer is built by itself, on a rank of its own: have each builder make its own, and return a"
                f" ModelDefinition with ties=(({other}, ParameterRef({layer!r}, {name!r})),), which keeps them equal"
            )
        self._known[id(parameter)] = (weakref.ref(parameter), layer, name)
