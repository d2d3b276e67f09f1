"""A state's chunks fit only into the buffer that its header allocated."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from state_streams import bits, rich_state

from workers.state.layer_state import LayerState
from workers.state_stream.encoding import PartialState, chunks, header

TWO = LayerState(
    1, "two", {"a": torch.arange(6.0), "b": torch.arange(3, dtype=torch.int16)}, {}, {}, {"a": 1}
)


def test_chunks_may_change_their_size_on_the_way() -> None:
    state = rich_state()
    loading = PartialState(header(state, 17))
    sizes: list[int] = []

    def growing() -> int:
        sizes.append(7 * len(sizes) + 1)
        return sizes[-1]

    made = list(chunks(state, growing))
    assert [len(chunk) for chunk in made[:-1]] == sizes[: len(made) - 1]
    for chunk in made:
        loading.load(chunk)
    assert loading.missing_bytes == 0
    assert loading.step == 17
    assert bits(loading.state) == bits(state)


@pytest.mark.parametrize("count", [0, 31])
def test_a_chunk_that_does_not_fit_is_an_error(count: int) -> None:
    loading = PartialState(header(TWO, 17))
    assert loading.bytes == 30
    with pytest.raises(ValueError, match=f"chunk of {count} bytes, where 30 were missing"):
        loading.load(bytes(count))


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": [["weights", "a", "", "object", [1]]]},
        {"tensors": [["weights", "a", "", "float32", [-1]]]},
        {"tensors": [["weights", "a", "", "float32", [1 << 60]]]},
        {"tensors": [["attributes", "a", "", "float32", [1]]]},
        {"tensors": [["slots", "a", "m", "float32", [1]]]},
        {"tensors": [["weights"]]},
        {"tensors": 3},
        {"updates": ["a"]},
        {"layer": None},
        {"step": "now"},
    ],
    ids=str,
)
def test_what_is_no_header_is_an_error(change: dict[str, Any]) -> None:
    about = json.loads(header(TWO, 17))
    with pytest.raises(ValueError, match="not the header of a layer's state"):
        PartialState(json.dumps(about | change).encode())


@pytest.mark.parametrize("text", [b"", b"[]", b"\x80\x04K\x01.", b"{}"])
def test_what_is_no_json_object_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="not the header of a layer's state"):
        PartialState(text)
