"""Text to tokens and back: UTF-8 bytes, or a Hugging Face `tokenizer.json`.

Knows nothing of files of text.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.data.dataset import Tokenizer
from workers.protocol.errors import JobError


class ByteTokenizer:
    """A token per UTF-8 byte."""

    @property
    def vocabulary(self) -> int:
        return 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`; what is not UTF-8 (or not a byte) becomes the replacement character."""
        # 0xFF occurs nowhere in UTF-8, so a token of a wider model's vocabulary reads as one bad byte.
        return bytes(token if token < 256 else 0xFF for token in tokens).decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library. Adds no special tokens of its own."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        # Not the count of entries: ids may have gaps, and the embedding has a row up to the largest.
        self._vocabulary = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer = name` means: `bytes`, or the path of a `tokenizer.json`.

    Raises:
        JobError: the file is missing or is none, or the library is not installed.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = _existing(name)
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise JobError(
            f"data.tokenizer = {name!r} needs the library tokenizers, which is not installed:"
            " pip install 'freshet[tokenizers]', or set data.tokenizer to bytes"
        ) from error
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise JobError(f"data.tokenizer = {name!r} is not a Hugging Face tokenizer.json: {error}") from error
    return HuggingFaceTokenizer(backend)


def tokenizer_identity(name: str) -> str:
    """Tokenizer's part of the token cache's key, for `data.tokenizer = name`: the name, or the hash of the file.

    Raises:
        JobError: the file is missing.
    """
    return name if name == "bytes" else hashlib.sha256(_existing(name).read_bytes()).hexdigest()


def encode_array(tokenizer: Tokenizer, text: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The tokens of `text` as an array; bytes without a Python object per token."""
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(dtype, copy=False)
    return np.asarray(tokenizer.encode(text), dtype=dtype)


def _existing(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise JobError(
            f"data.tokenizer = {name!r} is no file: set it to bytes, or to the path of a Hugging Face"
            " tokenizer.json"
        )
    return path
