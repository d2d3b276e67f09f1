"""The built-in families: shapes, sizes, initial values and each layer's guarantees."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from jobs import DEVICE
from torch import Tensor, nn

from workers.config import ModelConfig
from workers.models.definition import ModelDefinition
from workers.models.families.llama import default_hidden
from workers.models.modules.llama import GroupedQueryAttention, LlamaHead, RMSNorm, Rotary
from workers.models.modules.transformer import SelfAttention
from workers.models.outline import outline
from workers.models.registry import build_definition
from workers.protocol.errors import JobError

LANGUAGE = {
    "gpt": ModelConfig(family="gpt", layers=3, width=32, heads=4, context=16),
    "gpt tied": ModelConfig(family="gpt", layers=2, width=32, heads=4, context=16, tied_embeddings=True),
    "llama": ModelConfig(family="llama", layers=2, width=32, heads=4, kv_heads=2, context=16),
    "llama tied": ModelConfig(family="llama", layers=2, width=32, heads=4, context=16, tied_embeddings=True),
}
VIT = ModelConfig(
    family="vit", layers=2, width=32, heads=4, image_size=12, patch_size=3, channels=3, classes=7
)


def build(definition: ModelDefinition, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [builder.build() for builder in definition.layers]


def forward(modules: list[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


@pytest.mark.parametrize("config", LANGUAGE.values(), ids=LANGUAGE.keys())
def test_language_families_start_at_the_loss_of_a_uniform_guess(config: ModelConfig) -> None:
    definition = build_definition(config, 256)
    assert definition.names == ("embed", *(f"block{i}" for i in range(config.layers)), "head")
    assert definition.language
    modules = build(definition)
    tokens = torch.randint(0, 256, (4, 16))
    logits = forward(modules, tokens)
    assert logits.shape == (4, 16, 256)
    loss = definition.loss(logits, torch.randint(0, 256, (4, 16)))
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)
    loss.backward()
    assert all(p.grad is not None for module in modules for p in module.parameters())


@pytest.mark.parametrize("config", [*LANGUAGE.values(), VIT], ids=[*LANGUAGE, "vit"])
def test_the_two_halves_of_a_block_compute_what_it_does(config: ModelConfig) -> None:
    halved = build_definition(config.model_copy(update={"units": "halves"}), 256)
    definition = build_definition(config, 256)
    parts = [f"block{n}-{half}" for n in range(config.layers) for half in ("attention", "feed_forward")]
    assert halved.names == ("embed", *parts, "head")
    assert halved.ties == definition.ties
    modules, halves = build(definition), dict(zip(halved.names, build(halved), strict=True))
    for name, module in zip(definition.names, modules, strict=True):
        its = {n: m for n, m in halves.items() if n == name or n.startswith(f"{name}-")}
        values = module.state_dict()
        assert sum(len(each.state_dict()) for each in its.values()) == len(values)
        for each in its.values():
            each.load_state_dict({key: values[key] for key in each.state_dict()})
    inputs = torch.rand(2, 3, 12, 12) if config is VIT else torch.randint(0, 256, (2, 16))
    whole, cut = forward(modules, inputs), forward([*halves.values()], inputs)
    assert torch.equal(whole, cut)
    weights = torch.randn_like(whole)
    for logits in (whole, cut):
        logits.backward(weights)
    for name, module in halves.items():
        block = modules[definition.names.index(name.partition("-")[0])]
        for key, parameter in module.named_parameters():
            assert torch.equal(parameter.grad, block.get_parameter(key).grad), (name, key)


def test_vit_starts_at_the_loss_of_a_uniform_guess() -> None:
    definition = build_definition(VIT, None)
    assert definition.names == ("embed", "block0", "block1", "head")
    assert not definition.language
    modules = build(definition)
    images = torch.rand(5, 3, 12, 12)
    assert modules[0](images).shape == (5, 1 + 16, 32)
    logits = forward(modules, images)
    assert logits.shape == (5, 7)
    loss = definition.loss(logits, torch.randint(0, 7, (5,)))
    assert loss.item() == pytest.approx(math.log(7), abs=0.05)
    loss.backward()
    assert all(p.grad is not None for module in modules for p in module.parameters())


def test_vgg_16_has_the_parameters_of_its_paper() -> None:
    """Table 2 of Simonyan and Zisserman: 133, 133, 138 and 144 million with 1,000 classes and images of 224 pixels."""
    for depth, millions in ((11, 133), (13, 133), (16, 138), (19, 144)):
        paper = ModelConfig(family="vgg", depth=depth, image_size=224, classes=1000)
        outlines = outline(build_definition(paper, None))
        assert len(outlines) == depth
        assert round(sum(layer.parameters for layer in outlines) / 1e6) == millions


def test_vgg_classifies_images() -> None:
    small = ModelConfig(family="vgg", depth=16, width=4, hidden=16, image_size=32, classes=7)
    definition = build_definition(small, None)
    assert definition.names == (*(f"conv{n}" for n in range(13)), "dense0", "dense1", "head")
    modules = build(definition)
    images = torch.rand(5, 3, 32, 32)
    sides, x = [], images
    for module in modules[:13]:
        x = module(x)
        sides.append(x.shape[-1])
    assert sides == [32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2, 1]
    logits = forward(modules, images)
    assert logits.shape == (5, 7)
    loss = definition.loss(logits, torch.randint(0, 7, (5,)))
    assert loss.item() == pytest.approx(math.log(7), abs=0.05)
    loss.backward()
    assert all(p.grad is not None for module in modules for p in module.parameters())
    with pytest.raises(JobError, match=r"model.image_size = 40 is not divisible by 32.*choose 64"):
        build_definition(small.model_copy(update={"image_size": 40}), None)


def test_loss_is_the_mean_over_every_position_in_float32() -> None:
    definition = build_definition(LANGUAGE["gpt"], 256)
    logits, targets = torch.randn(2, 3, 11), torch.randint(0, 11, (2, 3))
    by_hand = -torch.stack([logits[b, t].log_softmax(-1)[targets[b, t]] for b in range(2) for t in range(3)])
    torch.testing.assert_close(definition.loss(logits, targets), by_hand.mean())
    low = logits.bfloat16()
    assert definition.loss(low, targets).dtype == torch.float32
    assert torch.equal(definition.loss(low, targets), definition.loss(low.float(), targets))


def block_parameters(width: int, hidden: int) -> int:
    norms = 2 * 2 * width
    attention = (width + 1) * 3 * width + (width + 1) * width
    return norms + attention + (width + 1) * hidden + (hidden + 1) * width


def test_gpt_parameter_counts() -> None:
    sizes = [layer.parameters for layer in outline(build_definition(LANGUAGE["gpt"], 256))]
    block = block_parameters(32, 128)
    assert sizes == [256 * 32 + 16 * 32, block, block, block, 2 * 32 + 32 * 256]


def test_llama_parameter_counts() -> None:
    sizes = [layer.parameters for layer in outline(build_definition(LANGUAGE["llama"], 256))]
    hidden = 96  # 8/3 of 32 is 85.3
    attention = 2 * 32 * 32 + 2 * 32 * (2 * 8)
    block = 2 * 32 + attention + 3 * 32 * hidden
    assert sizes == [256 * 32, block, block, 32 + 32 * 256]


def test_vit_parameter_counts() -> None:
    sizes = [layer.parameters for layer in outline(build_definition(VIT, None))]
    embed = (3 * 3 * 3 + 1) * 32 + 32 + (1 + 16) * 32
    block = block_parameters(32, 128)
    assert sizes == [embed, block, block, 2 * 32 + (32 + 1) * 7]


@pytest.mark.parametrize("family", ["gpt", "llama", "vit"])
def test_hidden_width_is_a_setting(family: str) -> None:
    config = ModelConfig(**{"family": family, "width": 32, "layers": 1, "hidden": 40})
    block = build_definition(config, 256).layers[1].build()
    shapes = {tuple(p.shape) for p in block.parameters() if 40 in p.shape}
    assert {(40, 32), (32, 40)} <= shapes


@pytest.mark.parametrize(("width", "hidden"), [(32, 96), (48, 128), (96, 256), (128, 352), (4096, 10944)])
def test_llama_default_hidden(width: int, hidden: int) -> None:
    assert default_hidden(width) == hidden


@pytest.mark.parametrize("family", ["gpt", "llama", "vit"])
def test_initial_values_are_gpt2s(family: str) -> None:
    config = ModelConfig(**{"family": family, "layers": 8, "width": 128, "heads": 4})
    modules = build(build_definition(config, 256))
    for module in modules:
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                assert torch.equal(parameter, torch.zeros_like(parameter)), name
            elif "norm" in name:
                assert torch.equal(parameter, torch.ones_like(parameter)), name
            elif parameter.numel() >= 4096:
                residual = name.endswith(("attention.projection.weight", "feed_forward.projection.weight"))
                assert parameter.std().item() == pytest.approx(0.02 / (4 if residual else 1), rel=0.05), name


def test_a_layers_values_depend_on_the_generator_alone() -> None:
    block = build_definition(LANGUAGE["llama"], 256).layers[1]
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        states.append(block.build().state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("config", LANGUAGE.values(), ids=LANGUAGE.keys())
def test_no_token_sees_a_later_one(config: ModelConfig) -> None:
    modules = build(build_definition(config, 256))
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 256
    before, after = forward(modules, tokens), forward(modules, changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("config", LANGUAGE.values(), ids=LANGUAGE.keys())
def test_shorter_inputs_than_the_context_are_taken(config: ModelConfig) -> None:
    modules = build(build_definition(config, 256))
    tokens = torch.randint(0, 256, (2, 16))
    torch.testing.assert_close(forward(modules, tokens[:, :5]), forward(modules, tokens)[:, :5])


def test_vit_attends_both_ways() -> None:
    modules = build(build_definition(VIT, None))
    images = torch.rand(1, 3, 12, 12)
    changed = images.clone()
    changed[..., -1, -1] += 1  # the last patch; the class token comes first
    assert not torch.equal(forward(modules, images), forward(modules, changed))


def test_vit_patches_are_cut_row_by_row() -> None:
    embed = build(build_definition(VIT, None))[0]
    images = torch.rand(1, 3, 12, 12)
    changed = images.clone()
    changed[..., 3:6, 6:9] += 1  # row 1, column 2 of a 4 x 4 grid
    moved = (embed(images) != embed(changed)).any(dim=-1)[0]
    assert moved.nonzero().flatten().tolist() == [1 + 1 * 4 + 2]


@pytest.mark.parametrize("family", ["gpt", "llama", "vit"])
def test_dropout_is_in_embedding_and_both_branches_and_nowhere_else(family: str) -> None:
    config = ModelConfig(**{"family": family, "layers": 1, "width": 32, "dropout": 0.25})
    modules = build(build_definition(config, 256))
    found = [[m.p for m in module.modules() if isinstance(m, nn.Dropout)] for module in modules]
    assert found == [[0.25], [0.25, 0.25], []]
    x = torch.randn(2, 5, 32)
    assert not torch.equal(modules[1](x), modules[1](x))
    modules[1].eval()
    assert torch.equal(modules[1](x), modules[1](x))


@pytest.mark.parametrize("name", ["gpt tied", "llama tied"])
def test_tied_embeddings_name_both_uses_of_one_shape(name: str) -> None:
    definition = build_definition(LANGUAGE[name], 256)
    (tie,) = definition.ties
    assert [str(ref) for ref in tie] == ["embed.token.weight", "head.projection.weight"]
    modules = dict(zip(definition.names, build(definition), strict=True))
    shapes = [modules[ref.layer].get_parameter(ref.parameter).shape for ref in tie]
    assert shapes == [(256, 32), (256, 32)]
    assert build_definition(LANGUAGE[name.removesuffix(" tied")], 256).ties == ()


def test_configured_vocabulary_goes_before_the_tokenizers() -> None:
    config = LANGUAGE["gpt"].model_copy(update={"vocabulary": 300})
    assert outline(build_definition(config, 256))[-1].parameters == 2 * 32 + 32 * 300


def test_llama_has_no_bias_and_keeps_its_tables_out_of_the_state() -> None:
    for module in build(build_definition(LANGUAGE["llama"], 256)):
        assert all(name.endswith("weight") for name in module.state_dict())


def test_rms_norm_scales_to_unit_mean_square() -> None:
    x = torch.randn(3, 64) * 7
    normed = RMSNorm(64)(x)
    torch.testing.assert_close(normed.square().mean(-1), torch.ones(3), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x, (64,), eps=1e-5))


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    rotary = Rotary(head_width=8, context=32)
    query, key = torch.randn(8), torch.randn(8)
    turned_query = rotary(query.expand(1, 1, 32, 8))[0, 0]
    turned_key = rotary(key.expand(1, 1, 32, 8))[0, 0]
    scores = turned_query @ turned_key.T
    assert torch.equal(turned_query[0], query)
    for distance in (0, 3, -11):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores[0, 0], scores[0, 3])


def turned_by_the_formula(rotary: Rotary, x: Tensor) -> Tensor:
    """Su et al. 2021, eq. 34, as autograd goes back through it."""
    length, half = x.shape[-2], x.shape[-1] // 2
    cosine, sine = rotary.cosine[:length, :half], rotary.sine[:length]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).type_as(x)


def kernels_of(turn: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[int, int]:
    """How many operations forward and backward compute or copy."""
    kernels = re.compile("aten::(mul|add|sub|neg|cat|copy)_?$")

    def count(profiled: torch.profiler.profile) -> int:
        return sum(bool(kernels.match(event.name)) for event in profiled.events() or ())

    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as forward:
        turned = turn(x)
    with torch.profiler.profile(activities=cpu) as backward:
        torch.autograd.grad(turned, x, grad)
    return count(forward), count(backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotary_has_the_bits_of_its_formula_in_fewer_kernels(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rotary = Rotary(head_width=16, context=32).to(DEVICE)
    x = torch.randn(2, 24, 3 * 16, device=DEVICE, dtype=dtype, requires_grad=True)
    grad = torch.randn(2, 3, 24, 16, device=DEVICE).to(dtype)

    def split(turn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return turn(x.view(2, 24, 3, 16).transpose(1, 2))

    ways = partial(split, rotary), partial(split, partial(turned_by_the_formula, rotary))
    found: list[tuple[Tensor, Tensor]] = []
    for way in ways:
        turned = way(x)
        (back,) = torch.autograd.grad(turned, x, grad)
        found.append((turned, back))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == dtype
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    with torch.no_grad():
        assert torch.equal(ways[0](x), found[0][0])
    if dtype == torch.float32:  # a CPU casts in operations of their own
        assert [kernels_of(way, x, grad) for way in ways] == [(4, 4), (7, 9)]


def test_grouped_queries_are_full_attention_with_repeated_keys_and_values() -> None:
    torch.manual_seed(0)
    grouped = GroupedQueryAttention(width=32, heads=4, kv_heads=2, context=16, dropout=0.0)
    full = GroupedQueryAttention(width=32, heads=4, kv_heads=4, context=16, dropout=0.0)
    with torch.no_grad():
        full.query.weight.copy_(grouped.query.weight)
        full.projection.weight.copy_(grouped.projection.weight)
        for name in ("key", "value"):
            repeated = getattr(grouped, name).weight.view(2, 8, 32).repeat_interleave(2, dim=0)
            getattr(full, name).weight.copy_(repeated.reshape(32, 32))
    x = torch.randn(2, 16, 32)
    torch.testing.assert_close(grouped(x), full(x))


def test_self_attention_is_softmax_of_scaled_scores() -> None:
    torch.manual_seed(0)
    attention = SelfAttention(width=16, heads=2, causal=True, dropout=0.0)
    x = torch.randn(1, 5, 16)
    query, key, value = attention.qkv(x)[0].split(16, dim=-1)
    heads = []
    for head in (slice(0, 8), slice(8, 16)):
        scores = query[:, head] @ key[:, head].T / math.sqrt(8)
        masked = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(masked.softmax(-1) @ value[:, head])
    torch.testing.assert_close(attention(x)[0], attention.projection(torch.cat(heads, dim=-1)))


@pytest.mark.parametrize("family", ["gpt", "llama", "vit"])
def test_under_autocast_the_residual_stream_stays_float32(family: str) -> None:
    config = ModelConfig(**{"family": family, "layers": 1, "width": 32})
    modules = build(build_definition(config, 256))
    x = torch.rand(2, 1, 8, 8) if family == "vit" else torch.randint(0, 256, (2, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stream = modules[0](x)
        assert stream.dtype == torch.float32
        assert modules[1](stream).dtype == torch.float32
        assert modules[2](modules[1](stream)).dtype == torch.bfloat16


def test_matrices_sit_in_modules_whose_gradient_can_be_deferred() -> None:
    for config in (*LANGUAGE.values(), VIT):
        for module in build(build_definition(config, 256)):
            covered = {
                id(child.weight)
                for child in module.modules()
                if isinstance(child, (nn.Linear, nn.Embedding, nn.Conv2d))
            }
            bare = [name for name, p in module.named_parameters() if p.dim() > 1 and id(p) not in covered]
            assert bare in ([], ["position"])  # the learned positions of vit are added, not multiplied


def test_head_needs_no_other_layer() -> None:
    assert LlamaHead(vocabulary=10, width=8)(torch.randn(2, 3, 8)).shape == (2, 3, 10)
