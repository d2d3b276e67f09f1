"""Tokens on disk: written once, reused, and never incomplete, even when two processes open them at once."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
from pace import patient

from workers.config import DataConfig, ModelConfig
from workers.data.corpus import TextFiles
from workers.data.registry import open_dataset
from workers.data.token_cache import open_tokens
from workers.data.tokenizer import ByteTokenizer
from workers.protocol.errors import JobError

MODEL = ModelConfig(family="gpt", context=8)


@dataclass(frozen=True)
class CountingCorpus:
    """Counts how often its text is read."""

    files: tuple[Path, ...]
    texts: tuple[str, ...]
    reads: list[int]
    name: str = "counting"

    def documents(self) -> Iterator[str]:
        self.reads.append(1)
        yield from self.texts


@pytest.fixture
def corpus(tmp_path: Path) -> CountingCorpus:
    file = tmp_path / "a.txt"
    file.write_text("x")
    return CountingCorpus((file,), ("one", "zwei ö", "\U0001f40d"), [])


def test_the_bytes_come_back(corpus: CountingCorpus, tmp_path: Path) -> None:
    tokens = open_tokens(corpus, ByteTokenizer(), "bytes", tmp_path / "cache").tokens
    assert tokens.dtype == np.uint8
    assert ByteTokenizer().decode(tokens.tolist()) == "one\n\nzwei ö\n\n\U0001f40d"
    assert not tokens.flags.writeable


def test_written_once_and_reused(corpus: CountingCorpus, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = open_tokens(corpus, ByteTokenizer(), "bytes", folder).tokens
    (file,) = folder.glob("*.uint8")
    written = file.stat()
    second = open_tokens(corpus, ByteTokenizer(), "bytes", folder).tokens
    assert np.array_equal(first, second)
    assert len(corpus.reads) == 1
    assert (written.st_mtime_ns, written.st_ino) == (file.stat().st_mtime_ns, file.stat().st_ino)
    assert file.stat().st_size == len(first)


def test_the_digest_follows_the_text_and_not_its_place(tmp_path: Path) -> None:
    texts = {"a.txt": "some words", "b.txt": "some words", "c.txt": "other word"}
    digests = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        cached = open_tokens(TextFiles((tmp_path / name,)), ByteTokenizer(), "bytes", tmp_path / "cache")
        assert cached.sha256 == hashlib.sha256(text.encode()).hexdigest()
        digests[name] = cached.sha256
    assert digests["a.txt"] == digests["b.txt"] != digests["c.txt"]


def test_anything_that_decides_on_the_tokens_makes_another_cache(
    corpus: CountingCorpus, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    (file,) = corpus.files
    other = tmp_path / "b.txt"
    other.write_text("x")

    def open_and_count(changed: CountingCorpus, identity: str = "bytes") -> int:
        open_tokens(changed, ByteTokenizer(), identity, folder)
        return len(list(folder.glob("*.uint8")))

    assert open_and_count(corpus) == 1
    assert open_and_count(replace(corpus, name="other")) == 2
    assert open_and_count(corpus, identity="0f3a") == 3
    assert open_and_count(replace(corpus, files=(other,))) == 4
    assert open_and_count(replace(corpus, files=(file, other))) == 5
    assert open_and_count(replace(corpus, files=(other, file))) == 6
    os.utime(file, ns=(1, 1))
    assert open_and_count(corpus) == 7
    stamp = file.stat().st_mtime_ns
    file.write_text("xy")
    os.utime(file, ns=(stamp, stamp))
    assert open_and_count(corpus) == 8
    assert open_and_count(corpus) == 8


@dataclass(frozen=True)
class WideTokenizer:
    vocabulary: int

    def encode(self, text: str) -> list[int]:
        return [self.vocabulary - 1 for _ in text]

    def decode(self, tokens: list[int]) -> str:
        return "?" * len(tokens)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32), (200_000, np.uint32)],
)
def test_the_smallest_type_that_holds_the_vocabulary(
    corpus: CountingCorpus, tmp_path: Path, vocabulary: int, dtype: type
) -> None:
    tokens = open_tokens(corpus, WideTokenizer(vocabulary), "wide", tmp_path / "cache").tokens
    assert tokens.dtype == dtype
    assert set(tokens.tolist()) == {vocabulary - 1}


@dataclass(frozen=True)
class OvertakenCorpus(CountingCorpus):
    """While its text is read for the first time, another process opens the same cache and finishes first."""

    folder: Path = Path()

    def documents(self) -> Iterator[str]:
        self.reads.append(1)
        yield self.texts[0]
        if len(self.reads) == 1:
            open_tokens(self, ByteTokenizer(), "bytes", self.folder)
        yield from self.texts[1:]


def test_being_overtaken_while_writing_is_harmless(corpus: CountingCorpus, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    overtaken = OvertakenCorpus(corpus.files, corpus.texts, [], folder=folder)
    tokens = open_tokens(overtaken, ByteTokenizer(), "bytes", folder).tokens
    assert len(overtaken.reads) == 2
    assert tokens.tobytes() == "one\n\nzwei ö\n\n\U0001f40d".encode()
    assert len(list(folder.glob("*.uint8"))) == 1
    assert not list(folder.glob("*.partial"))


def open_at_once(barrier: Barrier, text: str, caches: list[str]) -> None:
    expected = Path(text).read_bytes()
    for cache in caches:
        barrier.wait(timeout=patient(60))
        tokens = open_tokens(TextFiles((Path(text),)), ByteTokenizer(), "bytes", Path(cache)).tokens
        assert tokens.tobytes() == expected


def test_two_processes_open_at_once(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(128)) * 4000)
    caches = [str(tmp_path / f"cache{i}") for i in range(20)]
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=open_at_once, args=(barrier, str(text), caches)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=patient(120))
    assert [process.exitcode for process in processes] == [0, 0]
    for cache in caches:
        assert sorted(file.suffix for file in Path(cache).iterdir()) == [".sha256", ".uint8"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.txt", tmp_path / "b.txt"
    good.write_text("fine")
    bad.write_bytes(b"\xff\xfe")
    config = DataConfig(source="text", path=(str(good), str(bad)))
    with pytest.raises(JobError, match=r"b.txt is not UTF-8 text \(byte 0: invalid start byte\)"):
        open_dataset(config, MODEL, str(tmp_path / "job"))
    assert list((tmp_path / "job" / "data").iterdir()) == []


def test_what_killed_processes_left_goes_after_a_day(corpus: CountingCorpus, tmp_path: Path) -> None:
    names = ("{}.uint8.a.partial", "{}.rows.a.partial/tokens", "{}.rows.b.partial/tokens", "{}.rows/tokens")
    files = [tmp_path / name.format("0" * 32) for name in names]
    files.extend((tmp_path / f"{'1' * 32}.uint8.b.partial", tmp_path / "mine.partial"))
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    two_days_ago = time.time() - 2 * 86_400
    for path in tmp_path.rglob("*"):
        os.utime(path, (two_days_ago, two_days_ago))
    for written in (files[2], files[4]):
        os.utime(written)
    open_tokens(corpus, ByteTokenizer(), "bytes", tmp_path)
    assert [file.exists() for file in files] == [False, False, True, True, True, True]
    assert not files[1].parent.exists()


def test_a_folder_that_cannot_be_written_is_named(corpus: CountingCorpus, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(
        JobError, match=r"token cache .* cannot be written \(.*\): set data.cache to a folder"
    ):
        open_tokens(corpus, ByteTokenizer(), "bytes", blocked / "cache")


def test_a_damaged_cache_is_named(corpus: CountingCorpus, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    open_tokens(corpus, WideTokenizer(300), "wide", folder)
    (file,) = folder.glob("*.uint16")
    file.write_bytes(b"abc")
    with pytest.raises(JobError, match=rf"{file.name} cannot be read .*: delete it, it is made again"):
        open_tokens(corpus, WideTokenizer(300), "wide", folder)


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    text = tmp_path / "a.txt"
    text.write_text("word " * 100)
    for output, cache, folder in [
        (str(tmp_path / "job"), None, tmp_path / "job" / "data"),
        (f"file://{tmp_path}/job2", None, tmp_path / "job2" / "data"),
        ("s3://bucket/job", None, tmp_path / "home" / ".cache" / "freshet" / "data"),
        ("s3://bucket/job", str(tmp_path / "mine"), tmp_path / "mine"),
    ]:
        open_dataset(DataConfig(source="text", path=str(text), cache=cache), MODEL, output)
        assert len(list(folder.glob("*.uint8"))) == 1
    assert not list(folder.glob("*.partial"))
