"""The one layout of what crosses a layer boundary, also of images whose channels lie last."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.layers.absent import absent_like, is_absent
from workers.reproducibility.canonical import canonical, has_channels_last, in_memory_order
from workers.transport.channel import MessageFormat

IMAGES = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
LAST = IMAGES.to(memory_format=torch.channels_last)
VIDEOS_LAST = torch.arange(2.0 * 3 * 2 * 2 * 2).view(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize(
    "tensor",
    [
        IMAGES,
        LAST,
        LAST[1:],
        LAST[:, :, 1:],
        LAST.permute(0, 2, 3, 1),
        IMAGES.transpose(2, 3),
        IMAGES[..., :1].to(memory_format=torch.channels_last),
        IMAGES[:, :1].to(memory_format=torch.channels_last),
        VIDEOS_LAST,
        torch.zeros(3, 4).t(),
        torch.zeros(0, 3, 2, 2),
    ],
)
def test_a_canonical_tensor_lies_as_what_is_allocated_for_its_message(tensor: Tensor) -> None:
    found = canonical(tensor)
    (fresh,) = MessageFormat.decode(MessageFormat.of((found,)).encode()).allocate()
    assert found.equal(tensor)
    assert (found.stride(), found.storage_offset()) == (fresh.stride(), 0)
    assert canonical(found) is found
    in_memory_order(fresh).copy_(in_memory_order(found))
    assert fresh.equal(tensor)


@pytest.mark.parametrize("tensor", [torch.arange(9.0).view(3, 3).t(), LAST.transpose(2, 3), IMAGES[:, 1:]])
def test_what_is_sent_of_another_layout_arrives_in_order(tensor: Tensor) -> None:
    """As a buffer, which nobody made canonical."""
    (fresh,) = MessageFormat.of((tensor,)).allocate()
    in_memory_order(fresh).copy_(in_memory_order(tensor))
    assert fresh.equal(tensor)


def test_only_images_keep_their_channels_last() -> None:
    assert canonical(LAST) is LAST
    assert canonical(VIDEOS_LAST) is VIDEOS_LAST
    assert has_channels_last(LAST)
    for other in (IMAGES, IMAGES.transpose(2, 3), torch.zeros(3, 4).t()):
        assert not has_channels_last(other)
        assert canonical(other).is_contiguous()


def test_an_absent_gradient_lies_as_what_it_is_the_gradient_of() -> None:
    absent = absent_like(LAST)
    assert MessageFormat.of((absent,)) == MessageFormat.of((LAST,))
    assert is_absent(absent)
    assert not is_absent(LAST)
