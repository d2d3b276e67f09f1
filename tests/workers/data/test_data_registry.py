"""Every source of data, and the errors when it cannot be opened."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models, pre_tokenizers

from workers.config import DataConfig, ModelConfig
from workers.data.dataset import OpenData
from workers.data.registry import open_dataset
from workers.data.tokenizer import ByteTokenizer, load_tokenizer
from workers.protocol.errors import JobError

MODEL = ModelConfig(family="gpt", context=8)
Open = Callable[..., OpenData]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """A function that opens the source that some `[data]` settings describe."""

    def open_with(model: ModelConfig = MODEL, **settings: Any) -> OpenData:
        config = DataConfig.model_validate({"validation_fraction": 0.0, **settings})
        return open_dataset(config, model, str(tmp_path / "job"))

    return open_with


def text_of(data: OpenData) -> str:
    """The entire training text: every input in order, and the last target."""
    assert data.tokenizer is not None
    batch = data.dataset.train(list(range(data.dataset.train_samples)))
    tokens = [*batch.inputs[0].flatten().tolist(), int(batch.targets[0][-1, -1])]
    return data.tokenizer.decode(tokens)


def test_python_docs_is_the_manual_in_the_order_of_its_topics(opened: Open) -> None:
    data = opened(source="python-docs")
    manual = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    samples = (len(manual) - 1) // 8
    assert data.dataset.train_samples == samples
    assert text_of(data).encode() == manual[: samples * 8 + 1]
    assert (data.vocabulary, data.tokens_per_sample) == (256, 8)


def test_the_default_data_holds_out_the_end_of_the_manual(tmp_path: Path) -> None:
    data = open_dataset(DataConfig(), ModelConfig(family="gpt"), str(tmp_path)).dataset
    total = data.train_samples + data.validation_samples
    assert data.validation_samples == int(total * 0.05) > 100
    last = data.validation([data.validation_samples - 1]).targets[0]
    manual = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    assert bytes(last[0].tolist()) == manual[total * 128 - 127 : total * 128 + 1]


def test_text_files_and_folders_in_order(opened: Open, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("bbb")
    (folder / "a.MD").write_text("aaa")
    (folder / "sub" / "c.rst").write_text("ccc")
    (folder / "empty.txt").write_text("")
    (folder / "code.py").write_text("not text")
    (tmp_path / "named.py").write_text("code")
    model = ModelConfig(family="gpt", context=1)
    data = opened(model, source="text", path=[str(tmp_path / "named.py"), str(folder)])
    assert text_of(data) == "code\n\naaa\n\nbbb\n\nccc"


def test_line_ends_are_kept(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r")
    assert text_of(
        opened(ModelConfig(family="gpt", context=2), source="text", path=str(tmp_path / "a.txt"))
    ) == ("one\r\ntwo\r")


def test_jsonl_reads_the_field_of_every_line(opened: Open, tmp_path: Path) -> None:
    lines = [json.dumps({"body": text, "id": 1}) for text in ("eins", "zwei\u2028x", "drei")]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n")
    data = opened(ModelConfig(family="gpt", context=1), source="jsonl", path=str(tmp_path), field="body")
    assert text_of(data) == "eins\n\nzwei\u2028x\n\ndrei"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"a.jsonl:2 is not JSON \(.*\): each line must hold one whole JSON object"),
        ("[1]", r"a.jsonl:2 holds a JSON list: each line must hold one JSON object"),
        ('{"t": "x", "id": 1}', r"a.jsonl:2 has no field 'text', it has id, t: set data.field"),
        ("{}", r"a.jsonl:2 has no field 'text', it has no field at all"),
        ('{"text": 3}', r"a.jsonl:2: the field 'text' is of type int, not text"),
        ('{"text": "\\ud800"}', r"a.jsonl:2: the field 'text' holds an invalid character"),
    ],
)
def test_broken_jsonl_lines_are_named(opened: Open, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "long enough text"}}\n{line}\n')
    with pytest.raises(JobError, match=message):
        opened(source="jsonl", path=str(tmp_path / "a.jsonl"))


def test_jsonl_that_is_not_utf8_is_named(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(JobError, match=r"a.jsonl:1 is not JSON \(.*utf-8"):
        opened(source="jsonl", path=str(tmp_path / "a.jsonl"))


def test_files_that_cannot_be_used(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"data.source = 'text' needs data.path: name a file, a folder"):
        opened(source="text")
    with pytest.raises(JobError, match=r"data.path: .*nowhere.txt does not exist \(looked in .*\)"):
        opened(source="text", path=str(tmp_path / "nowhere.txt"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(JobError, match=r"data.path: .*empty.txt is empty: name a file with something in it"):
        opened(source="text", path=str(tmp_path / "empty.txt"))
    with pytest.raises(
        JobError, match=r"the folder .* holds no file ending in .md, .rst, .txt with anything in"
    ):
        opened(source="text", path=str(tmp_path))
    with pytest.raises(JobError, match=r"holds no file ending in .jsonl"):
        opened(source="jsonl", path=str(tmp_path))
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(JobError, match=r"blank.jsonl: there is no text in it"):
        opened(source="jsonl", path=str(tmp_path / "blank.jsonl"))


def test_too_little_text(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("12345678")
    with pytest.raises(JobError, match=r"has 8 tokens, and one sample needs model.context \+ 1 = 9"):
        opened(source="text", path=str(tmp_path / "a.txt"))
    (tmp_path / "b.txt").write_text("x" * 17)
    with pytest.raises(JobError, match=r"data.validation_fraction = 0.05 holds out none of 2 samples"):
        opened(source="text", path=str(tmp_path / "b.txt"), validation_fraction=0.05)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "python_docs",
            r"'python_docs' is not one of python-docs, text, jsonl, table, digits: did you mean 'python-docs'\?",
        ),
        ("txt", r"did you mean 'text'\?"),
        ("imagenet", r"write one of them, or package.module:function"),
        ("workers.nowhere:open", r"data.source = 'workers.nowhere:open' does not import"),
    ],
)
def test_unknown_sources(opened: Open, source: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        opened(source=source)


@pytest.mark.parametrize("source", ["python-docs", "digits", "workers.protocol.errors:JobError"])
def test_a_path_that_would_not_be_read_is_refused(opened: Open, source: str) -> None:
    with pytest.raises(JobError, match=r"data.path is set, but data.source = .* reads no files"):
        opened(ModelConfig(factory="a:b"), source=source, path="my.txt")


def test_arguments_that_would_not_be_passed_are_refused(opened: Open) -> None:
    with pytest.raises(JobError, match=r"'text' takes none: remove them"):
        opened(source="text", arguments={"a": 1})


def test_text_and_images_do_not_mix(opened: Open) -> None:
    with pytest.raises(JobError, match=r"'digits' is images, and model.family = 'gpt' reads tokens"):
        opened(source="digits")
    with pytest.raises(JobError, match=r"'python-docs' is text, and model.family = 'vit' reads images"):
        opened(ModelConfig(family="vit"), source="python-docs")


def test_tokens_beyond_the_configured_vocabulary(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain ascii text")
    narrow = ModelConfig(family="gpt", context=8, vocabulary=128)
    assert opened(narrow, source="text", path=str(tmp_path / "a.txt")).vocabulary == 256
    (tmp_path / "b.txt").write_text("naïve text with more")
    with pytest.raises(JobError, match=r"vocabulary = 128, but the text holds token 195: .* tokenizer's 256"):
        opened(narrow, source="text", path=str(tmp_path / "b.txt"))


SOURCE_MODULE = """
import torch

from workers.data.dataset import Batch, OpenData
from workers.data.tokenizer import ByteTokenizer

class Squares:
    validation_samples = 0
    def __init__(self, samples):
        self.train_samples = samples
    def train(self, indices):
        x = torch.tensor(indices)
        return Batch((x,), (x * x,))
    def validation(self, indices):
        return self.train(indices)

def squares(samples=4):
    return Squares(samples)

def described():
    return OpenData(dataset=Squares(3), tokenizer=ByteTokenizer(), vocabulary=256, tokens_per_sample=1)

def wrong():
    return {1, 2}

def broken():
    raise OSError("disk on fire")
"""


def test_sources_by_import_path(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "source_under_test.py").write_text(SOURCE_MODULE)
    data = opened(source="source_under_test:squares", arguments={"samples": 9})
    assert (data.tokenizer, data.vocabulary, data.tokens_per_sample) == (None, None, 0)
    assert data.dataset.train_samples == 9
    assert data.dataset.train([3]).targets[0].tolist() == [9]
    described = opened(source="source_under_test:described")
    assert (described.vocabulary, described.tokens_per_sample) == (256, 1)
    with pytest.raises(
        JobError, match=r"returned a set without train_samples, .*, train, validation: return an"
    ):
        opened(source="source_under_test:wrong")
    with pytest.raises(JobError, match=r"the function raised OSError: disk on fire"):
        opened(source="source_under_test:broken")
    with pytest.raises(JobError, match=r"returned a data set with 0 training samples: it needs at least one"):
        opened(source="source_under_test:squares", arguments={"samples": 0})


def test_byte_tokens_round_trip() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve \U0001f40d\n\0"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([104, 105, 0xC3]) == "hi\ufffd"
    assert tokenizer.decode([104, 300, 105]) == "h\ufffdi"


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> str:
    """A tokenizer of a few words, with a gap in its ids."""
    words = {"[UNK]": 0, "one": 1, "two": 2, "three": 400}
    backend = HuggingFace(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return str(path)


def test_hugging_face_tokenizers(opened: Open, tmp_path: Path, word_tokenizer: str) -> None:
    (tmp_path / "a.txt").write_text("one two three one four two")
    model = ModelConfig(family="gpt", context=5)
    data = opened(model, source="text", path=str(tmp_path / "a.txt"), tokenizer=word_tokenizer)
    assert data.vocabulary == 401
    batch = data.dataset.train([0])
    assert batch.inputs[0].tolist() == [[1, 2, 400, 1, 0]]
    assert batch.targets[0].tolist() == [[2, 400, 1, 0, 2]]
    assert batch.inputs[0].dtype == torch.int64
    assert data.tokenizer is not None
    assert data.tokenizer.decode([1, 400]) == "one three"
    assert data.tokenizer.encode("two four") == [2, 0]
    (cache,) = (tmp_path / "job" / "data").glob("*.uint16")
    assert np.fromfile(cache, dtype=np.uint16).tolist() == [1, 2, 400, 1, 0, 2]


def test_tokenizers_that_cannot_be_loaded(
    tmp_path: Path, word_tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        JobError,
        match=r"data.tokenizer = 'byte' is neither a file nor a folder with a tokenizer.json: set it to bytes",
    ):
        load_tokenizer("byte")
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(JobError, match=r"broken.json' is not a Hugging Face tokenizer.json: "):
        load_tokenizer(str(broken))
    real_import = builtins.__import__

    def without_tokenizers(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tokenizers)
    with pytest.raises(JobError, match=r"is not installed: pip install 'freshet\[tokenizers\]', or set"):
        load_tokenizer(word_tokenizer)


def test_a_python_without_its_manual(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        JobError, match=r"this Python came without its manual \(the module pydoc_data.topics\)"
    ):
        opened(source="python-docs")


def test_importing_and_opening_text_loads_no_library_of_another_source(tmp_path: Path) -> None:
    code = f"""
import sys
from workers.config import DataConfig, ModelConfig
from workers.data.registry import open_dataset
for _ in range(2):
    open_dataset(DataConfig(), ModelConfig(family="gpt"), {str(tmp_path)!r})
    assert not {{"sklearn", "tokenizers", "datasets", "PIL"}} & set(sys.modules)
del sys.modules["pydoc_data.topics"]
open_dataset(DataConfig(), ModelConfig(family="gpt"), {str(tmp_path)!r})
assert "pydoc_data.topics" not in sys.modules, "a cached manual is not read"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
