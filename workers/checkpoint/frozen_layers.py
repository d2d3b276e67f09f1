"""Frozen layers that no checkpoint copies: the one before has their files, and nothing of them has changed since.

Each update of a parameter counts, so within a generation equal counts mean equal weights and optimizer state. Buffers
and freezing statistics, small for most layers, are compared by their digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workers.checkpoint.manifest import FileRecord, layer_files
from workers.state.layer_state import LayerState, digest_of

_Witness = tuple[dict[str, int], str]


class FrozenLayers:
    """The frozen layers that one rank has written in a generation, and their files."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[_Witness, tuple[FileRecord, ...]]] = {}
        self._begun: dict[int, tuple[_Witness, tuple[str, str]]] = {}

    def files_of(self, state: LayerState) -> tuple[FileRecord, ...]:
        """The shared files that hold `state`; none unless that is certain."""
        known = self._files.get(state.layer)
        if known is None or known[0] != _witness(state):
            return ()
        return tuple(replace(record, written_bytes=0) for record in known[1])

    def begin(self, states: Sequence[LayerState], prefix: int) -> None:
        """Remember which `states` are about to be written of the layers below `prefix`, and forget those above."""
        self._files = {layer: known for layer, known in self._files.items() if layer < prefix}
        self._begun = {
            state.layer: (_witness(state), layer_files(state.layer, state.name))
            for state in states
            if state.layer < prefix
        }

    def end(self, records: Sequence[FileRecord]) -> None:
        """Remember the shared ones of the files that were written."""
        shared = {record.name: record for record in records if record.shared}
        for layer, (witness, files) in self._begun.items():
            if shared.keys() >= set(files):
                self._files[layer] = witness, tuple(shared[file] for file in files)
        self._begun = {}

    def forget(self) -> None:
        """Have everything written again: some file may be gone."""
        self._files, self._begun = {}, {}


def _witness(state: LayerState) -> _Witness:
    return dict(state.updates), digest_of(state.buffers, state.freezing)
