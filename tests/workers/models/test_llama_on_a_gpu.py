"""LLaMA's kernels on a GPU: grouped queries without copies of keys and values, and the fused norm."""

from __future__ import annotations

import pytest
import torch
from jobs import DEVICE
from torch import Tensor
from torch.nn import functional

from workers.models.modules.llama import GroupedQueryAttention, RMSNorm

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs FRESHET_TEST_DEVICE=cuda")


def test_shared_keys_and_values_have_the_bits_of_repeated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    attention = GroupedQueryAttention(width=512, heads=8, kv_heads=2, context=256, dropout=0.0)
    attention.to(DEVICE, torch.bfloat16)
    x = torch.randn(4, 256, 512, device=DEVICE, dtype=torch.bfloat16)
    stock = functional.scaled_dot_product_attention
    shared: list[bool] = []

    def spied(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
        shared.append(enable_gqa and key.shape[1] == 2)
        return stock(query, key, value, is_causal=is_causal, enable_gqa=enable_gqa)

    def repeated(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **_: bool) -> Tensor:
        key, value = (attention._per_query_head(one) for one in (key, value))
        return stock(query, key, value, is_causal=is_causal)

    found: list[list[Tensor]] = []
    for kernel in (spied, repeated):
        monkeypatch.setattr(functional, "scaled_dot_product_attention", kernel)
        attention.zero_grad()
        output = attention(x)
        output.square().sum().backward()
        found.append([output, *(p.grad for p in attention.parameters() if p.grad is not None)])
    assert shared == [True]
    assert len(found[0]) == 5
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_norm_is_near_and_repeats_its_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(768).to(DEVICE, dtype)
    plain = RMSNorm(768)
    given = torch.randn(8, 256, 768, dtype=dtype)
    results: list[list[Tensor]] = []
    for _ in range(3):
        norm.zero_grad()
        x = given.to(DEVICE).requires_grad_()
        output = norm(x)
        output.float().square().sum().backward()
        assert x.grad is not None
        assert norm.weight.grad is not None
        results.append([output, x.grad, norm.weight.grad])
    assert all(a.equal(b) for again in results[1:] for a, b in zip(results[0], again, strict=True))
    x = given.float().requires_grad_()
    output = plain(x)
    output.square().sum().backward()
    near = 1e-4 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(results[0], (output, x.grad, plain.weight.grad), strict=True):
        assert theirs is not None
        torch.testing.assert_close(ours.cpu().float(), theirs.detach(), rtol=near, atol=near * 4)
