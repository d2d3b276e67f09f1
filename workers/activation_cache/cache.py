"""The activations that one rank keeps at the end of the frozen layers that its first stage begins with.

Kept by sample, number of layers and a digest of these layers: what was kept before other weights, another mode or
another kind of device is never found again. As the prefix grows, a sample goes on from what is kept of fewer layers,
and that is overwritten. Nothing is kept that changes a bit or does not pay, see `trial.py`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from workers.activation_cache.cache_folders import CacheFolders
from workers.activation_cache.code import code_of
from workers.activation_cache.elsewhere import KeptElsewhere
from workers.activation_cache.row_form import RowForm, rows_of
from workers.activation_cache.slot_files import MARK_BYTES, SlotFiles
from workers.activation_cache.trial import TrialResult, tried
from workers.layers.layer import Layer, Tensors
from workers.protocol.reports import ActivationsKept, ActivationsUsed, Report, WarningReport
from workers.reproducibility import rng
from workers.state.layer_state import digest_of

READS = 3
"""Reads of one microbatch that tell how long one takes."""
REPORT_EVERY = 100
"""Steps between two reports of how often something was kept."""


@dataclass(frozen=True)
class _Kept:
    """Facts about the activations after some layers."""

    form: RowForm
    computed_s: float
    """Time to compute a microbatch through all of these layers."""
    read_s: float = 0.0
    """Time to read it."""
    why_not: str = ""
    """Why none are kept; empty if they are."""

    def to_json(self) -> str:
        times = {"computed_s": self.computed_s, "read_s": self.read_s}
        return json.dumps({"form": self.form.to_json(), **times})

    @staticmethod
    def from_json(text: str) -> _Kept | None:
        """None if `text` tells of nothing that is kept."""
        try:
            match json.loads(text):
                case {"form": str(form), "computed_s": float(computed_s), "read_s": float(read_s)}:
                    return _Kept(RowForm.from_json(form), computed_s, read_s)
        except (ValueError, TypeError):
            pass
        return None


@dataclass(frozen=True, kw_only=True)
class CacheSubject:
    """The job whose activations are kept."""

    identity: object
    """Facts besides the layers that decide about activations: data, model, precision, kind of device."""
    held_out_from: int
    """Number of training samples, from which held-out ones are counted on."""
    compares: bool
    """Whether to compare samples with themselves, read alone."""
    why_not: str
    """Why this job can keep none, as its samples change; empty if it can."""


class ActivationCache:
    """One rank's, through all its generations. One thread calls `begin`, `passed` and `end`; another may `find`, and
    any asks for what others want of it (`raw`, `noted`).

    Args:
        folders: where to keep them; None: nowhere.
        secret: the job's, with which ranks ask each other for them.
        takes_s: layers and the time in which they computed a microbatch -> the time that counts.
    """

    def __init__(
        self,
        folders: CacheFolders | None,
        subject: CacheSubject,
        *,
        rank: int,
        device: torch.device,
        report: Callable[[Report], None],
        secret: bytes = b"",
        takes_s: Callable[[Sequence[int], float], float] = lambda _, seconds: seconds,
    ) -> None:
        self._folders = folders
        identity = json.dumps(subject.identity, sort_keys=True, default=str)
        self._base = hashlib.sha256(identity.encode()).digest()
        self._rank = rank
        self._device = device
        self._held_out_from = subject.held_out_from
        self._compares = subject.compares
        self._report = report
        self._warn = lambda text: report(WarningReport(rank=rank, text=text))
        self._why_not = subject.why_not
        self._takes_s = takes_s
        self._secret = secret
        self._elsewhere: KeptElsewhere | None = None
        """Ranks of this generation that keep some too; None: there are none."""
        self._came: set[int] = set()
        """Slots that came from there and are not kept here yet."""
        self.holds = False
        """Whether this rank keeps any, or has kept some for a first stage that another one has now."""
        self._slots: SlotFiles | None = None
        self._layers: tuple[Layer, ...] = ()
        self._training = True
        self._step = 0
        self._digests: list[bytes] = []
        """Digests of the first of `_layers`."""
        self._keys: tuple[bytes, ...] = ()
        """Key of what the first n of `_layers` make, by n."""
        self._kept: dict[bytes, _Kept] = {}
        """By key, as far as this process, or another one before it, has computed any."""
        self._told: set[bytes] = set()
        self._hits = self._partly = self._misses = self._fetches = 0
        self.used = False
        """Whether anything was found, tried or written since the step began: its times tell little of the layers."""
        self._again = (True, True)
        """Whether training and held-out samples come again."""

    def offer(self) -> bool:
        """Whether this rank keeps any for others to ask for in the generation that forms."""
        if self.holds:
            self._open()
        return self.holds

    def ask(self, peers: Sequence[tuple[str, int]]) -> None:
        """A generation has formed: what is not here may be with `peers`, (host, port) of ranks of other nodes."""
        if peers and self._secret and self._folders is not None:
            self._elsewhere = KeptElsewhere(peers, self._secret)

    def stop_asking(self) -> None:
        """The generation is over: what is being asked for is not waited for. Any thread."""
        elsewhere = self._elsewhere
        if elsewhere is not None:
            elsewhere.stop()

    def raw(self, number: int, row_bytes: int, mark: bytes) -> bytes | None:
        """See `workers.state_stream.rows.KeptRows`."""
        slots = self._slots
        return None if slots is None else slots.raw(number, row_bytes, mark)

    def noted(self, name: str) -> str | None:
        """See `workers.state_stream.rows.KeptRows`."""
        slots = self._slots
        return None if slots is None else slots.noted(name)

    def begin(
        self,
        layers: Sequence[Layer],
        step: int,
        *,
        training: bool,
        again: tuple[bool, bool] = (True, True),
        frozen: bool = False,
    ) -> None:
        """`step` begins, in which `layers`, from the input up, are frozen as a whole and have final weights.

        Args:
            training: mode of these layers.
            again: whether training samples, and held-out ones, come again before the job ends: else no more are kept.
            frozen: whether any layers are frozen as a whole, if not here: others may ask for what was kept of them.
        """
        self._step, self.used, self._again = step, False, again
        layers = () if self._folders is None else tuple(layers)
        if len(layers) != len(self._layers) or step % REPORT_EVERY == 0:
            self._tell_use()
        same = [a is b for a, b in zip(layers, self._layers, strict=False)]
        if training != self._training or not all(same):
            self._tell_use()
            self._renew()
        if layers or (frozen and self.holds):
            self._open()
        elif self.holds and self._folders is not None:
            self._close(self._folders)
        self._layers, self._training = layers, training
        del self._digests[len(layers) :]
        for layer in layers[len(self._digests) :]:
            module = layer.module
            held = digest_of(dict(module.named_parameters()), dict(module.named_buffers()))
            self._digests.append(bytes.fromhex(held) + code_of(module))
        if len(self._keys) != len(layers) + 1:
            keys = [hashlib.sha256(self._base + bytes([training])).digest()]
            for digest in self._digests:
                keys.append(hashlib.sha256(keys[-1] + digest).digest())
            self._keys = tuple(keys)
            self._look_up()

    def _open(self) -> None:
        if self._slots is None and self._folders is not None:
            self._slots, self.holds = SlotFiles(self._folders.open(self._warn), self._warn), True

    def _look_up(self) -> None:
        """Learn what others have kept, here or elsewhere: on the same kind of device, and so after a trial."""
        if self._slots is not None and self._compares and not self._why_not:
            self._why_not = self._slots.noted(self._base.hex()) or ""
        keys = [self._key(key, held_out) for key in self._keys[1:] for held_out in (False, True)]
        for key in keys:
            text = None if key in self._kept or self._slots is None else self._slots.noted(key.hex())
            if text is not None and (kept := _Kept.from_json(text)) is not None:
                self._kept[key] = kept
        lacking = [key.hex() for key in keys if key not in self._kept]
        if self._elsewhere is None or self._slots is None or not lacking:
            return
        base = [self._base.hex()] if self._compares and not self._why_not else []
        found = self._elsewhere.notes([*base, *lacking])
        self._why_not = self._why_not or found.pop(self._base.hex(), "")
        for name, text in found.items():
            if (kept := _Kept.from_json(text)) is not None:
                self._kept[bytes.fromhex(name)] = kept

    @property
    def depth(self) -> int:
        """Layers whose outputs may be kept in this step, from the input up; 0: none."""
        if self._why_not and self._told:
            return 0
        for through in range(len(self._keys) - 1, 0, -1):
            known = self._kept.get(self._keys[through])
            if known is None or not known.why_not:
                return through
        return 0

    def check_samples(
        self, samples: Sequence[int], inputs: Tensors, again: Callable[[list[int]], Tensors]
    ) -> None:
        """Keep nothing from now on if a sample of a microbatch with these inputs is another one when it is read alone,
        by `again`: if the data draw, or fill samples up to the longest of their microbatch."""
        if not self._compares or self._why_not:
            return
        for row, sample in enumerate(samples):
            alone = again([sample])
            if len(alone) != len(inputs) or not all(
                a.dtype == b.dtype and torch.equal(a, b[row : row + 1])
                for a, b in zip(alone, inputs, strict=True)
            ):
                self._why_not = "a sample is not the same whenever it is read"
                if self._slots is not None:
                    self._slots.note(self._base.hex(), self._why_not)
                if self._told:
                    self._warn(f"what frozen layers make of samples is no longer kept: {self._why_not}")
                return

    def find(
        self, samples: Sequence[int], *, held_out: bool = False
    ) -> tuple[int, tuple[Tensor, ...]] | None:
        """Find a microbatch: the layers that it has gone through, and what the last of them handed on, as fresh
        canonical tensors of the host. None: not of all its samples."""
        slots, keys = self._slots, self._keys
        if slots is None or not samples:
            return None
        for through in range(len(keys) - 1, 0, -1):
            key = self._key(keys[through], held_out)
            kept = self._kept.get(key)
            if kept is None or kept.why_not:
                continue
            found = kept.form.empty(len(samples))
            lacking = [
                (self._slot(sample, held_out), _mark(key, sample), row)
                for sample, row in zip(samples, rows_of(found), strict=True)
                if not slots.read(self._slot(sample, held_out), row, _mark(key, sample))
            ]
            if not lacking or self._fetched(key, kept, lacking):
                return through, found
        return None

    def _fetched(
        self, key: bytes, kept: _Kept, lacking: Sequence[tuple[int, bytes, Sequence[memoryview]]]
    ) -> bool:
        """Fetch rows from other ranks; whether all of them are there."""
        elsewhere = self._elsewhere
        if elsewhere is None or not elsewhere.fetch(key, lacking, kept.computed_s):
            return False
        self._came |= {slot for slot, _, _ in lacking}
        return True

    def passed(
        self,
        samples: Sequence[int],
        through: int,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        *,
        held_out: bool = False,
    ) -> None:
        """A microbatch has gone through the first `depth` layers, `through` of them by what was kept.

        Args:
            inputs: of the layers after those.
            outputs: of the last of them; canonical, each [B, ...].
        """
        depth = self.depth
        if self._slots is None or not samples or not depth:
            return
        self.used = self.used or through > 0
        key = self._key(self._keys[depth], held_out)
        kept = self._kept.get(key)
        came = self._came & {self._slot(sample, held_out) for sample in samples}
        self._came -= came
        if through == depth and kept is not None:
            self._hits += 1
            if came:
                self._fetches += 1
                if self._again[held_out]:
                    self._write(self._slots, key, samples, outputs, held_out)
            self._tell(key, depth, kept, held_out)
            return
        if not self._again[held_out]:
            self._partly += through > 0
            self._misses += kept is not None and not kept.why_not and not through
            return
        self.used = True
        if kept is None:
            kept = self._weighed(self._slots, depth, samples, through, inputs, outputs, held_out=held_out)
            self._kept[key] = kept
        elif not kept.why_not and RowForm.of(outputs) == kept.form:
            self._write(self._slots, key, samples, outputs, held_out)
        if not kept.why_not:
            self._partly += through > 0
            self._misses += not through

    def _weighed(
        self,
        slots: SlotFiles,
        depth: int,
        samples: Sequence[int],
        through: int,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        *,
        held_out: bool,
    ) -> _Kept:
        """Try the layers on a microbatch, and keep it; whether that pays."""
        layers, key = self._layers[through:depth], self._key(self._keys[depth], held_out)
        trial = TrialResult(self._why_not)
        if not self._why_not:
            trial = tried(
                layers,
                inputs,
                outputs,
                training=self._training and not held_out,
                mixed=not held_out,
                key=rng.key(self._step, "activations", self._rank),
                wait=self._wait,
            )
        computed_s = self._takes_s([layer.index for layer in layers], trial.computed_s)
        if through:
            computed_s += self._kept[self._key(self._keys[through], held_out)].computed_s
        form, why_not, read_s = RowForm.of(outputs), trial.why_not, 0.0
        if not why_not:
            self._kept[key] = _Kept(form, computed_s)
            written = self._write(slots, key, samples, outputs, held_out)
            if not written:
                why_not = "there is no room for any of them"
            else:
                read_s = median(self._read_s(written, held_out) for _ in range(READS))
                read_s *= len(samples) / len(written)
                if read_s >= computed_s:
                    why_not = "reading them takes longer than computing them"
        if why_not:
            for fewer in range(through + trial.fine + 1, depth):
                self._kept[self._key(self._keys[fewer], held_out)] = _Kept(form, 0.0, why_not=why_not)
        kept = _Kept(form, computed_s, read_s, why_not)
        self._tell(key, depth, kept, held_out)
        if not why_not:
            slots.note(key.hex(), kept.to_json())
        return kept

    def _tell(self, key: bytes, depth: int, kept: _Kept, held_out: bool) -> None:
        """Report once whether anything is kept under `key`."""
        if key in self._told:
            return
        self._told.add(key)
        self._report(
            ActivationsKept(
                step=self._step,
                rank=self._rank,
                layers=depth,
                held_out=held_out,
                why_not=kept.why_not,
                read_s=kept.read_s,
                computed_s=kept.computed_s,
            )
        )

    def _read_s(self, samples: Sequence[int], held_out: bool) -> float:
        begun_s = time.perf_counter()
        found = self.find(samples, held_out=held_out)
        for tensor in found[1] if found is not None else ():
            tensor.to(self._device)
        self._wait()
        return time.perf_counter() - begun_s

    def _write(
        self,
        slots: SlotFiles,
        key: bytes,
        samples: Sequence[int],
        outputs: tuple[Tensor, ...],
        held_out: bool,
    ) -> list[int]:
        """Write rows; returns the samples for which there was room."""
        # Of one depth, training and held-out samples may differ in length.
        of_depth = [self._kept.get(self._key(self._keys[self.depth], other)) for other in (False, True)]
        beside = [kept.form.row_bytes for kept in of_depth if kept is not None and not kept.why_not]
        return [
            sample
            for sample, row in zip(samples, rows_of(outputs), strict=True)
            if slots.write(self._slot(sample, held_out), row, _mark(key, sample), beside)
        ]

    def _slot(self, sample: int, held_out: bool) -> int:
        return sample + self._held_out_from if held_out else sample

    def _key(self, key: bytes, held_out: bool) -> bytes:
        """Held-out samples go through the layers in evaluation mode, and always beside the same others."""
        return hashlib.sha256(key + b"held out").digest() if held_out else key

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _tell_use(self) -> None:
        if not (self._hits or self._partly or self._misses):
            return
        self._report(
            ActivationsUsed(
                step=self._step,
                rank=self._rank,
                layers=len(self._layers),
                hits=self._hits,
                partly=self._partly,
                misses=self._misses,
                bytes=0 if self._slots is None else self._slots.taken_bytes(),
                fetched=self._fetches,
                fetch_s=0.0 if self._elsewhere is None else self._elsewhere.takes_s,
            )
        )
        self._hits = self._partly = self._misses = self._fetches = 0

    def pause(self) -> None:
        """A generation ends: the next one may be of another step."""
        self._tell_use()
        self._renew()
        self._ask_no_more()
        if self._slots is not None and self._folders is not None:
            self._slots.close()
            self._slots = None
            self._folders.release()

    def end(self, *, done: bool) -> None:
        """Training ends; give memory back.

        Args:
            done: whether the job is: else what is on disk stays for when it goes on.
        """
        self._tell_use()
        self._ask_no_more()
        if self._folders is not None:
            self._close(self._folders)
            if done:
                self._folders.remove()

    def _ask_no_more(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.stop()
            self._elsewhere = None
        self._came.clear()

    def _renew(self) -> None:
        """Take no layer for known."""
        self._layers, self._digests, self._keys = (), [], ()

    def _close(self, folders: CacheFolders) -> None:
        if self._slots is not None:
            self._slots.close()
            self._slots = None
        folders.close()
        self.holds = False
        self._kept.clear()
        self._renew()


def _mark(key: bytes, sample: int) -> bytes:
    return hashlib.blake2b(key + sample.to_bytes(8, "little"), digest_size=MARK_BYTES).digest()
