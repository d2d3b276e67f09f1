"""Which model definitions a spec can name, and the errors for those that it cannot have."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from workers.config import DataConfig, ModelConfig
from workers.data.registry import open_dataset
from workers.models.definition import LayerBuilder, ModelDefinition, ParameterRef
from workers.models.outline import outline
from workers.models.registry import build_definition
from workers.protocol.errors import JobError

_numbers = itertools.count()
WriteModule = Callable[[str], str]
HEAD = "from functools import partial\nfrom torch import nn\nfrom torch.nn import functional as F\n"


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteModule:
    """A function that writes a module which tests can import, and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> str:
        name = f"factory_under_test_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def from_factory(path: str, **arguments: Any) -> ModelDefinition:
    return build_definition(ModelConfig(factory=path, arguments=arguments), None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {},
            r"the spec names no model: set model.family to gpt, llama, vit, vgg or huggingface, or model.factory",
        ),
        (
            {"family": "gpt", "factory": "a:b"},
            r"model.family = 'gpt' and model.factory = 'a:b' are both set: keep one of them",
        ),
        (
            {"family": "gpt", "width": 130, "heads": 4},
            r"model.width = 130 is not divisible by model.heads = 4: choose a width of 128 or 132",
        ),
        ({"family": "vit", "width": 2, "heads": 4}, r"not divisible by model.heads = 4: choose a width of 4"),
        (
            {"family": "llama", "heads": 4, "kv_heads": 3},
            r"model.heads = 4 is not divisible by model.kv_heads = 3: choose a number .* divides 4",
        ),
        (
            {"family": "llama", "width": 12, "heads": 4},
            r"gives heads of 3, an odd width .*: choose a width of 8 or 16",
        ),
        (
            {"family": "vit", "image_size": 8, "patch_size": 3},
            r"model.image_size = 8 is not divisible by model.patch_size = 3",
        ),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((JobError, ValueError), match=message):
        build_definition(ModelConfig(**settings), 256)


def test_a_language_model_needs_a_vocabulary() -> None:
    with pytest.raises(JobError, match=r"'llama' needs a vocabulary and the data has no tokens"):
        build_definition(ModelConfig(family="llama"), None)


def test_factory_may_return_named_builders(write_module: WriteModule) -> None:
    name = write_module(
        HEAD + "def build(width):\n"
        "    return [('a', partial(nn.Linear, width, 3)), ('b', nn.ReLU)], F.cross_entropy\n"
    )
    definition = from_factory(f"{name}:build", width=5)
    assert definition.names == ("a", "b")
    assert definition.ties == ()
    assert not definition.language
    assert [layer.parameters for layer in outline(definition)] == [18, 0]
    assert definition.loss is nn.functional.cross_entropy


def test_factory_may_return_bare_builders(write_module: WriteModule) -> None:
    name = write_module(HEAD + "def build():\n    return (nn.ReLU, lambda: nn.Linear(2, 2)), nn.MSELoss()\n")
    definition = from_factory(f"{name}:build")
    assert definition.names == ("layer0", "layer1")
    assert isinstance(definition.layers[1].build(), nn.Linear)


def test_factory_may_return_layer_builders(write_module: WriteModule) -> None:
    name = write_module(
        HEAD + "from workers.models.definition import LayerBuilder\n"
        "def build():\n    return [LayerBuilder('x', nn.ReLU)], F.mse_loss\n"
    )
    assert from_factory(f"{name}:build").layers == (LayerBuilder("x", nn.ReLU),)


def test_factory_may_return_a_definition(write_module: WriteModule) -> None:
    name = write_module(
        HEAD + "from workers.models.definition import *\n"
        "def build():\n"
        "    linear = partial(nn.Linear, 2, 2)\n"
        "    layers = LayerBuilder('x', linear), LayerBuilder('y', linear)\n"
        "    tie = ParameterRef('x', 'weight'), ParameterRef('y', 'weight')\n"
        "    return ModelDefinition(layers, F.mse_loss, (tie,), True)\n"
    )
    definition = from_factory(f"{name}:build")
    assert definition.names == ("x", "y")
    assert definition.ties == ((ParameterRef("x", "weight"), ParameterRef("y", "weight")),)
    assert definition.language


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_colon", r"'no_colon' is not an import path: write package.module:function"),
        ("a.b:", r"is not an import path"),
        ("os:path:join", r"is not an import path"),
        (
            "nowhere_at_all:build",
            r"there is no module 'nowhere_at_all'; its folder must be on the Python path",
        ),
        ("workers.modles:build", r"there is no module 'workers.modles'"),
        (
            "workers.protocol.errors:JobEror",
            r"workers.protocol.errors has no 'JobEror'; did you mean 'JobError'\?",
        ),
        ("workers.protocol.errors:zzz", r"workers.protocol.errors has no 'zzz'$"),
        ("workers.models.modules.llama:ROTARY_BASE", r"'ROTARY_BASE' is not callable, it is of type float"),
    ],
)
def test_import_paths_that_lead_nowhere(path: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        from_factory(path)


def test_modules_that_fail_to_import_say_why(write_module: WriteModule) -> None:
    name = write_module("import not_installed_anywhere\n")
    with pytest.raises(JobError, match=rf"{name} imports 'not_installed_anywhere', which is not installed"):
        from_factory(f"{name}:build")
    name = write_module("x = 1 / 0\n")
    with pytest.raises(JobError, match=rf"{name} raised ZeroDivisionError: division by zero"):
        from_factory(f"{name}:build")


def test_factories_that_raise_say_why(write_module: WriteModule) -> None:
    name = write_module("def build(width):\n    raise ValueError(f'width {width} is odd')\n")
    with pytest.raises(JobError, match=r"raised ValueError: width 3 is odd \(it was called with width = 3\)"):
        from_factory(f"{name}:build", width=3)
    with pytest.raises(JobError, match=r"raised TypeError: .*'width' \(it was called with no arguments\)"):
        from_factory(f"{name}:build")


def test_errors_name_the_line_of_the_users_code(write_module: WriteModule, tmp_path: Path) -> None:
    name = write_module(
        "import json\n\n\ndef read():\n    return json.loads('{')\n\n\ndef build():\n    return read()\n"
    )
    with pytest.raises(JobError, match=rf", at {tmp_path / name}.py:5 in read$"):
        from_factory(f"{name}:build")
    name = write_module("\nx = 1 / 0\n")
    with pytest.raises(JobError, match=rf", at {tmp_path / name}.py:2 in <module>$"):
        from_factory(f"{name}:build")
    name = write_module("def build():\n    pass\n")
    with pytest.raises(JobError, match=r"\(it was called with width = 3\)$"):  # none of its lines ran
        from_factory(f"{name}:build", width=3)


def test_a_factory_that_exits_is_an_error(write_module: WriteModule, tmp_path: Path) -> None:
    name = write_module("import sys\n\n\ndef build():\n    sys.exit(0)\n")
    with pytest.raises(
        JobError, match=rf"the function called sys.exit\(0\) .*, at {tmp_path / name}.py:5 in build"
    ):
        from_factory(f"{name}:build")
    name = write_module("raise SystemExit\n")
    with pytest.raises(JobError, match=rf"does not import: {name} called sys.exit\(\), at .*:1 in <module>"):
        from_factory(f"{name}:build")
    name = write_module(
        "import sys\n\n\ndef layer():\n    sys.exit(7)\n\n\ndef build():\n    return [layer], print\n"
    )
    with pytest.raises(JobError, match=r"its builder called sys.exit\(7\), at .*:5 in layer"):
        outline(from_factory(f"{name}:build"))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", r"returned None: return \(layers, loss\)"),
        ("[nn.ReLU]", r"returned of type list: return \(layers, loss\)"),
        ("nn.Sequential(nn.ReLU())", r"returned one built Sequential: return \(layers, loss\) instead"),
        ("[], F.mse_loss", r"returned no layers: a model has at least one"),
        (
            "nn.ModuleList([nn.ReLU()]), F.mse_loss",
            r"layers that are of type ModuleList: these are already built",
        ),
        ("iter([nn.ReLU]), F.mse_loss", r"layers that are of type list_iterator: return a list"),
        ("[nn.ReLU()], F.mse_loss", r"layer 0 \(layer0\) is an already built ReLU: .*functools.partial\("),
        ("[('a', nn.ReLU())], F.mse_loss", r"layer 0 \(a\) is an already built ReLU"),
        ("[nn.ReLU, 'relu'], F.mse_loss", r"layer 1 \(layer1\) is of type str, not a builder"),
        (
            "[nn.Linear], F.mse_loss",
            r"layer 0 \(layer0\) has a builder that cannot be called without arguments",
        ),
        ("[('a', nn.ReLU), ('a', nn.ReLU)], F.mse_loss", r"layers 0 and 1 are both named 'a'"),
        ("[nn.ReLU, ('layer0', nn.ReLU)], F.mse_loss", r"layers 0 and 1 are both named 'layer0'"),
        ("[('a/b', nn.ReLU)], F.mse_loss", r"layer 0 is named 'a/b': a name has letters, digits"),
        ("[('', nn.ReLU)], F.mse_loss", r"layer 0 is named ''"),
        ("[(1, nn.ReLU)], F.mse_loss", r"layer 0 is named 1"),
        ("[nn.ReLU], None", r"returned a loss that is None"),
        (
            "[nn.ReLU], 'mse'",
            r"returned a loss that is of type str: return a function of \(outputs, targets\)",
        ),
        ("[nn.ReLU], nn.MSELoss", r"returned a loss that is the class MSELoss"),
    ],
)
def test_factories_that_return_something_else(write_module: WriteModule, returned: str, message: str) -> None:
    name = write_module(f"{HEAD}def build():\n    return {returned}\n")
    with pytest.raises(JobError, match=message):
        from_factory(f"{name}:build")


def test_ties_to_no_layer_are_refused(write_module: WriteModule) -> None:
    name = write_module(
        HEAD + "from workers.models.definition import *\n"
        "def build():\n"
        "    tie = ParameterRef('x', 'weight'), ParameterRef('z', 'weight')\n"
        "    return ModelDefinition((LayerBuilder('x', nn.ReLU),), F.mse_loss, (tie,))\n"
    )
    with pytest.raises(JobError, match=r"ties z.weight, but its layers are x"):
        from_factory(f"{name}:build")


def test_builders_of_the_families_take_no_arguments() -> None:
    for family in ("gpt", "llama", "vit"):
        config = ModelConfig(**{"family": family, "layers": 1, "width": 32})
        for builder in build_definition(config, 256).layers:
            assert isinstance(builder.build, partial)
            assert isinstance(builder.build(), nn.Module)


def test_the_example_learns_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    arguments = {"width": 8, "blocks": 1}
    config = ModelConfig(factory="examples.custom_model:convolutions", arguments=arguments)
    definition = build_definition(config, None)
    assert definition.names == ("stem", "block0", "classifier")
    data = open_dataset(DataConfig(source="digits"), config, str(tmp_path)).dataset
    torch.manual_seed(0)
    model = nn.Sequential(*(builder.build() for builder in definition.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(20):
        batch = data.train(list(range(step * 64, step * 64 + 64)))
        loss = definition.loss(model(*batch.inputs), *batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
