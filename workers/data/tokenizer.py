"""Text to tokens and back: UTF-8 bytes, or a Hugging Face `tokenizer.json`.

Knows nothing of files of text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.data.dataset import Tokenizer
from workers.protocol.errors import JobError

BYTES = "bytes"
FILE = "tokenizer.json"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
"""Files beside a tokenizer's own that say which token ends a text, and what a conversation looks like."""
Messages = Sequence[Mapping[str, str]]
"""A conversation: the role and the content of each message."""


@dataclass(frozen=True)
class EncodedText:
    """The tokens of a text or of a pair of texts."""

    tokens: Sequence[int]
    segments: Sequence[int]
    """Segment of each token: 1 in the second text of a pair, else 0."""
    offsets: Sequence[tuple[int, int]]
    """Characters of each token in its text, [start, stop); empty for a special token that is not in it."""
    special: Sequence[int]
    """Flag of each token: 1 if the tokenizer has added it."""


class TextTokenizer(Tokenizer, Protocol):
    """A tokenizer of texts that are samples of their own."""

    @property
    def end(self) -> int | None:
        """The token that ends a document; None: there is none."""
        ...

    @property
    def mask(self) -> int | None:
        """The token that stands for a hidden one; None: there is none."""
        ...

    @property
    def identity(self) -> str:
        """All that determines the tokens, as part of the key of what is cached."""
        ...

    def encoded(
        self, texts: Sequence[str], seconds: Sequence[str] | None = None, *, special: bool = True
    ) -> Sequence[EncodedText]:
        """The tokens of each text, or pair of texts.

        Args:
            special: whether to add the special tokens that a text has.
        """
        ...

    def conversation(self, messages: Messages, *, answer_follows: bool = False) -> str:
        """The messages in the form of the chat template.

        Args:
            answer_follows: whether to end with what precedes an answer.

        Raises:
            JobError: there is no template, or it does not take these messages.
        """
        ...


class ByteTokenizer:
    """A token per UTF-8 byte."""

    end = None
    mask = None
    identity = BYTES

    def encoded(
        self, texts: Sequence[str], seconds: Sequence[str] | None = None, *, special: bool = True
    ) -> Sequence[EncodedText]:
        """The tokens of each text, or pair of texts; there are no special ones."""
        pairs = zip(texts, seconds or [""] * len(texts), strict=True)
        return [_bytes_of(*pair) for pair in pairs]

    def conversation(self, messages: Messages, *, answer_follows: bool = False) -> str:
        raise JobError(
            'data.task = "chat" needs a tokenizer with a chat template, and data.tokenizer is bytes: name the folder of'
            " a model's tokenizer"
        )

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

    def __init__(self, backend: Any, file: Path) -> None:
        self._backend = backend
        self._folder = file.parent
        self.identity = _identity(file)
        # Not the count of entries: ids may have gaps, and the embedding has a row up to the largest.
        self._vocabulary = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=False)

    @property
    def end(self) -> int | None:
        return self._named("eos_token")

    @property
    def mask(self) -> int | None:
        return self._named("mask_token")

    def _named(self, key: str) -> int | None:
        """The token that `tokenizer_config.json` names."""
        try:
            named = json.loads((self._folder / BESIDE[0]).read_bytes()).get(key)
        except (OSError, ValueError, AttributeError):
            return None
        text = named.get("content") if isinstance(named, dict) else named
        return self._backend.token_to_id(text) if isinstance(text, str) else None

    def encoded(
        self, texts: Sequence[str], seconds: Sequence[str] | None = None, *, special: bool = True
    ) -> Sequence[EncodedText]:
        """The tokens of each text, or pair of texts, as the library finds them."""
        given = texts if seconds is None else [*zip(texts, seconds, strict=True)]
        found = self._backend.encode_batch(given, add_special_tokens=special)
        return [
            EncodedText(each.ids, each.type_ids, each.offsets, each.special_tokens_mask) for each in found
        ]

    def conversation(self, messages: Messages, *, answer_follows: bool = False) -> str:
        """The messages as transformers writes them."""
        template = self._with_template
        try:
            return template.apply_chat_template(
                [*messages], tokenize=False, add_generation_prompt=answer_follows
            )
        except Exception as error:  # whatever the template raises
            raise JobError(
                f"the chat template of data.tokenizer = {str(self._folder)!r} does not take {[*messages]!r:.200}:"
                f" {error}"
            ) from error

    @cached_property
    def _with_template(self) -> Any:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise JobError(
                f'data.task = "chat" needs the library transformers: {error}; pip install transformers'
            ) from error
        try:
            found = AutoTokenizer.from_pretrained(
                str(self._folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise JobError(
                f"data.tokenizer = {str(self._folder)!r} is no tokenizer of transformers: {error}"
            ) from error
        if not found.chat_template:
            raise JobError(
                f"data.tokenizer = {str(self._folder)!r} has no chat template: name the tokenizer of a model that was"
                " trained for conversations, or write chat_template.jinja beside it"
            )
        return found


def _bytes_of(text: str, second: str) -> EncodedText:
    tokens: list[int] = []
    segments: list[int] = []
    offsets: list[tuple[int, int]] = []
    for segment, each in enumerate((text, second)):
        for place, character in enumerate(each):
            found = character.encode()
            tokens.extend(found)
            segments.extend([segment] * len(found))
            offsets.extend([(place, place + 1)] * len(found))
    return EncodedText(tokens, segments, offsets, [0] * len(tokens))


def _identity(file: Path) -> str:
    """sha256 of a tokenizer's file and of those beside it."""
    found = [file, *(file.parent / name for name in BESIDE)]
    return hashlib.sha256(b"\0".join(each.read_bytes() for each in found if each.is_file())).hexdigest()


def load_tokenizer(name: str) -> TextTokenizer:
    """The tokenizer that `data.tokenizer = name` means: `bytes`, or the path of a `tokenizer.json` or of its folder.

    Raises:
        JobError: the file is missing or is none, or the library is not installed.
    """
    if name == BYTES:
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
        # Texts are cut and padded here, if at all.
        backend.no_truncation()
        backend.no_padding()
    except Exception as error:  # the library raises bare Exceptions
        raise JobError(f"data.tokenizer = {name!r} is not a Hugging Face tokenizer.json: {error}") from error
    return HuggingFaceTokenizer(backend, path)


def tokenizer_identity(name: str) -> str:
    """Tokenizer's part of the token cache's key, for `data.tokenizer = name`: the name, or the hash of the file.

    Raises:
        JobError: the file is missing.
    """
    return name if name == BYTES else hashlib.sha256(_existing(name).read_bytes()).hexdigest()


def encode_array(tokenizer: Tokenizer, text: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The tokens of `text` as an array; bytes without a Python object per token."""
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(dtype, copy=False)
    return np.asarray(tokenizer.encode(text), dtype=dtype)


def _existing(name: str) -> Path:
    path = Path(name) / FILE if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise JobError(
            f"data.tokenizer = {name!r} is neither a file nor a folder with a {FILE}: set it to bytes, or to the path"
            f" of a Hugging Face {FILE}"
        )
    return path
