"""Makes what finetune-llama.toml trains: a small LLaMA as transformers saves it, and conversations about sums.

    python examples/small_llama.py
    freshet train examples/finetune-llama.toml
    freshet export runs/finetune-llama --format huggingface --out runs/llama-that-adds

All of it is random but for the seed, and lies in runs/small-llama and runs/sums.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LARGEST = 30
SPECIAL = ("<pad>", "<user>", "<assistant>", "<end>", "<unknown>")
WORDS = ("what", "is", "+", "?", ".", *map(str, range(2 * LARGEST + 1)))
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
HELD_OUT = 100


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the words above, with a chat template."""
    numbers = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unknown>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    made.chat_template = TEMPLATE
    return made


def conversations() -> list[dict[str, list[dict[str, str]]]]:
    """Every sum of two numbers, in a random order: a question, and its answer."""
    found = []
    for one in range(LARGEST + 1):
        for other in range(LARGEST + 1):
            question = {"role": "user", "content": f"what is {one} + {other} ?"}
            answer = {"role": "assistant", "content": f"{one} + {other} is {one + other} ."}
            found.append({"messages": [question, answer]})
    random.Random(0).shuffle(found)
    return found


def main(folder: Path = Path("runs")) -> None:
    words = tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "small-llama")
    words.save_pretrained(folder / "small-llama")
    rows = [json.dumps(row) + "\n" for row in conversations()]
    (folder / "sums").mkdir(parents=True, exist_ok=True)
    (folder / "sums" / "held-out.jsonl").write_text("".join(rows[:HELD_OUT]))
    (folder / "sums" / "train.jsonl").write_text("".join(rows[HELD_OUT:]))
    print(f"wrote {folder / 'small-llama'} and {folder / 'sums'}: {len(rows):,} conversations")


if __name__ == "__main__":
    main()
