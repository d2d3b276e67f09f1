"""A folder as `save_pretrained` writes it, from the layers of a trained model: `from_pretrained` reads it.

Layer goes after layer, so that no more than a shard is in memory. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from workers.models.huggingface.architecture import Model, SourceLayer, Ties
from workers.models.huggingface.source import INDEX, SINGLE
from workers.protocol.errors import JobError

SHARD_BYTES = 5 * 10**9
"""Size of a shard, at most, unless one tensor is larger: that of `save_pretrained`."""
BESIDE = (
    *(
        "generation_config.json",
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template*",
    ),
    *("vocab*", "merges.txt", "*.model", "preprocessor_config.json", "processor_config.json"),
)
"""Patterns of the files that a model's folder holds beside weights and config.json, and that training leaves alone."""


def write_folder(
    model: Model,
    layers: Sequence[SourceLayer],
    ties: Ties,
    read: Callable[[int], Mapping[str, Tensor]],
    out: Path,
    *,
    source: Path | None,
    dtype: torch.dtype | None,
    shard_bytes: int = SHARD_BYTES,
) -> tuple[int, int, tuple[str, ...]]:
    """Write the model of `layers` into the folder `out`.

    Args:
        read: number of a layer -> its weights and buffers.
        source: the folder that it began with, whose tokenizer and the like are copied if it is there.
        dtype: of floating-point tensors; None: as they are trained.

    Returns:
        (number of tensors, their bytes, files copied from `source`).

    Raises:
        JobError: `out` holds something.
        OSError: it cannot be written.
    """
    with appearing(out) as part:
        sizes = _write_shards(layers, ties, read, part, dtype, shard_bytes)
        model.config.architectures = [model.name]
        if dtype is not None:
            model.config.dtype = dtype
        model.config.save_pretrained(part)
        beside = _copy_beside(source, part)
    return len(sizes), sum(sizes.values()), beside


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A folder that takes the name `out` once it is whole.

    Raises:
        JobError: `out` holds something.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise JobError(f"--out {out} exists: name a folder that does not, or an empty one")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield part
        part.chmod(0o755)
        os.replace(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write_shards(
    layers: Sequence[SourceLayer],
    ties: Ties,
    read: Callable[[int], Mapping[str, Tensor]],
    folder: Path,
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> dict[str, int]:
    """Write all tensors; returns the bytes of each."""
    again = {(use.layer, use.parameter) for _, *others in ties for use in others}
    shards: list[dict[str, int]] = []
    shard: dict[str, Tensor] = {}

    def close() -> None:
        save_file(shard, folder / f"{len(shards)}.part", {"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in shard.items()})
        shard.clear()

    for number, layer in enumerate(layers):
        for name, tensor in read(number).items():
            if (layer.name, name) in again:
                continue
            found = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            if shard and sum(each.nbytes for each in shard.values()) + found.nbytes > shard_bytes:
                close()
            shard[layer.source_key(name)] = found.contiguous()
    close()
    _name(shards, folder)
    return {name: size for each in shards for name, size in each.items()}


def _name(shards: Sequence[Mapping[str, int]], folder: Path) -> None:
    """Give the shards the names that tell of how many there are, and write their index."""
    if len(shards) == 1:
        (folder / "0.part").rename(folder / SINGLE)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        places |= dict.fromkeys(shard, file)
    total = sum(size for shard in shards for size in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _copy_beside(source: Path | None, folder: Path) -> tuple[str, ...]:
    """Copy what lies beside the weights; returns the names."""
    if source is None:
        return ()
    found = {path for pattern in BESIDE for path in source.glob(pattern) if path.is_file()}
    for path in found:
        shutil.copyfile(path, folder / path.name)
    return tuple(sorted(path.name for path in found))
