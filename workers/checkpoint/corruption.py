"""Damages a checkpoint, for drills."""

from __future__ import annotations

from workers.checkpoint.folder import checkpoints
from workers.checkpoint.storage import join, open_folder


def corrupt_newest_checkpoint(output: str) -> str | None:
    """Change one bit in the middle of the largest file of the newest checkpoint in the job folder `output`.

    Returns:
        The file's location; None if there is no checkpoint.

    Raises:
        OSError: it cannot be read or written.
    """
    for ref in checkpoints(output):
        folder = open_folder(ref.path)
        name, data = max(
            ((name, folder.read(name)) for name in folder.names() if name.endswith(".safetensors")),
            key=lambda entry: len(entry[1]),
        )
        changed = bytearray(data)
        changed[len(changed) // 2] ^= 1
        folder.write(name, bytes(changed))
        return join(ref.path, name)
    return None
