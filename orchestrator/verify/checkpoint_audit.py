"""Proof that a job's checkpoints add to its ledger: files are intact, and the last one has the job's final bits.

Reads every file; imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.events.types import Finished
from orchestrator.history.folder import undamaged
from orchestrator.verify.ledger import Ledger
from workers.protocol.orders import CheckpointRef


def log_heads(output: str) -> Iterator[tuple[str, str]]:
    """The checkpoints in the job folder `output` whose manifests name a line of the event log, in words, and the hash
    of that line."""
    from workers.checkpoint.folder import DamagedCheckpointError, checkpoints, read_manifest

    for ref in checkpoints(output):
        try:
            sha256 = read_manifest(ref).log_sha256
        except DamagedCheckpointError:  # the audit says so
            continue
        if sha256 is not None:
            yield f"the manifest of the checkpoint of step {ref.step}", sha256


def audit_checkpoints(output: str, ledger: Ledger) -> int:
    """Check all checkpoints in the job folder `output` and add errors to `ledger`. Return how many there are."""
    from workers.checkpoint.folder import checkpoints

    found = checkpoints(output)
    for ref in found:
        _audit_one(ref, ledger)
    newest = ledger.checkpoints[-1] if ledger.checkpoints else None
    if newest is not None and not any(_same(newest.path, ref.path) for ref in found):
        ledger.wrong.append(
            f"the newest checkpoint, of step {newest.step}, was reported whole and is gone: {newest.path}"
        )
    finished = ledger.end
    if not isinstance(finished, Finished) or finished.state_sha256 is None:
        return len(found)
    last = next((ref for ref in found if ref.step == finished.step), None)
    if last is None:
        ledger.unproved.append(f"the final bits: there is no checkpoint of the last step, {finished.step}")
    elif (kept := _state_sha256(last)) not in (None, finished.state_sha256):
        ledger.wrong.append(
            f"the checkpoint of step {last.step} holds state_sha256 {kept}, but the job ended with"
            f" {finished.state_sha256}"
        )
    return len(found)


def _audit_one(ref: CheckpointRef, ledger: Ledger) -> None:
    from workers.checkpoint.folder import DamagedCheckpointError, read_manifest

    try:
        manifest = read_manifest(ref)
    except DamagedCheckpointError as error:
        ledger.wrong.append(str(error))
        return
    if not undamaged(ref):
        ledger.wrong.append(f"the checkpoint of step {ref.step} is not as it was written: {ref.path}")
    if ledger.spec and ledger.knows_batches:
        position = ledger.batches.course.taken(manifest.step)
        if manifest.samples != position:
            ledger.wrong.append(
                f"the checkpoint of step {ref.step} states data position {manifest.samples}, where it is {position}"
            )


def _state_sha256(ref: CheckpointRef) -> str | None:
    """Hash of a checkpoint's layers; None if it is damaged."""
    from workers.checkpoint.folder import DamagedCheckpointError, read_layer, read_manifest
    from workers.reproducibility.digest import state_digest
    from workers.state.layer_state import digest

    try:
        manifest = read_manifest(ref)
        return state_digest(
            [digest(read_layer(ref, manifest, layer)) for layer in range(len(manifest.layers))]
        )
    except DamagedCheckpointError:
        return None


def _same(reported: str, found: str) -> bool:
    """Whether both paths name the same checkpoint: a job's folder may have been moved since."""
    return reported.rstrip("/").rpartition("/")[2] == found.rstrip("/").rpartition("/")[2]
