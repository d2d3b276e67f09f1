"""A small tokenizer of words in a folder as transformers saves it, with special tokens and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = (
    "the",
    "a",
    "sky",
    "is",
    "blue",
    "why",
    "?",
    ".",
    "light",
    "scatters",
    "good",
    "bad",
    "film",
    "what",
    "red",
)
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[END]", "<user>", "<assistant>", "[UNK]", "[MASK]")
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} [END]\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
HIDES = "{{ messages|length }} {% for message in messages %}{{ message.content }} {% endfor %}"
"""A template of which the begin changes with each message."""


def saved_tokenizer(folder: Path, template: str | None = TEMPLATE, *, end: str = "[END]") -> str:
    """Write the tokenizer; returns its folder.

    Args:
        template: of conversations; None: it has none.
    """
    numbers = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([*SPECIAL])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, numbers[name]) for name in ("[CLS]", "[SEP]")],
    )
    # As some are saved: what cuts and pads is the job's own business.
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "mask_token": "[MASK]",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)
