"""Models without a file of their own: cut at their blocks where the layers are the model, else refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import GENERIC, LENGTH, ROWS, saved_model, section_of, small_model
from torch import Tensor

from workers.models.huggingface.comparison import compare_with_whole
from workers.models.huggingface.definition import definition_of, model_of
from workers.protocol.errors import JobError

_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize("case", GENERIC)
def test_layers_are_compared_with_the_whole_model_before_a_job_starts(case: str, tmp_path: Path) -> None:
    saved_model(case, tmp_path)
    state = torch.get_rng_state()
    section_of(case, tmp_path).check_layers()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        # Masks of two kinds in turn; and positions that are told by the tokens.
        ("Gemma2ForCausalLM", {"head_dim": 8, "num_key_value_heads": 1, "sliding_window": 4}),
        ("RobertaForQuestionAnswering", {"type_vocab_size": 1}),
    ],
)
def test_more_models_are_what_their_layers_are(name: str, fields: dict[str, Any]) -> None:
    compare_with_whole(model_of({**_SIZES, **fields}, name))


def travelling(case: str, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What the first layer hands on beside hidden states."""
    hidden, *where = definition_of(small_model(case), None).layers[0].build()(*inputs)
    assert hidden.is_floating_point()
    return tuple(where)


def test_nothing_but_the_mask_travels_beside_hidden_states() -> None:
    tokens = torch.randint(4, 50, (ROWS, LENGTH))
    mask = torch.ones_like(tokens)
    whole = definition_of(small_model("electra, sequences"), None).layers[0].build()(tokens)
    assert isinstance(whole, Tensor)
    for case in ("gpt_neox", "electra, sequences", "distilbert, masked tokens"):
        (found,) = travelling(case, tokens, mask)
        assert found is mask


def test_tokens_travel_where_the_head_reads_them() -> None:
    """That of a decoder takes the last token that is no padding."""
    model = model_of(
        {**GENERIC["gpt_neox"][1], "pad_token_id": 0, "num_labels": 3}, "GPTNeoXForSequenceClassification"
    )
    compare_with_whole(model)
    tokens = torch.randint(4, 50, (ROWS, LENGTH))
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    _, first, second = definition_of(model, None).layers[0].build()(tokens, mask)
    assert second is mask
    assert torch.equal(first, tokens * mask)


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        (
            "T5ForSequenceClassification",
            {"num_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "vocab_size": 50},
            "it has several lists of blocks, .*encoder.block and .*decoder.block",
        ),
        (
            "AlbertForMaskedLM",
            {**_SIZES, "embedding_size": 16},
            r"no list of modules has as many as num_hidden_layers = 3 \(its lists: albert.encoder.* of 1\)",
        ),
        (
            "MPNetForMaskedLM",
            _SIZES,
            r"with two blocks what layer block0 returns differs by up to \d\.\de-\d\d from the whole model's",
        ),
        (
            "OPTForCausalLM",
            {**GENERIC["opt, tied"][1], "layerdrop": 0.1},
            r"it skips layers at random \(layerdrop",
        ),
    ],
)
def test_what_the_rule_does_not_fit_is_refused_by_name(name: str, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(  # noqa: PT012
        JobError,
        match=f"{name} has no file of its own here, and it cannot be cut at its blocks: {told}.*model.factory",
    ):
        model = model_of(fields, name)
        definition_of(model, None)
        compare_with_whole(model)


def test_transformers_says_nothing_of_its_own() -> None:
    """In a process of its own: it warns once, of token numbers and of masks for instance."""
    program = (
        "import torch\n"
        "from workers.models.huggingface.comparison import compare_with_whole\n"
        "from workers.models.huggingface.definition import model_of\n"
        f"for name in ('DebertaV2ForMaskedLM', 'GPTNeoXForCausalLM'): compare_with_whole(model_of({_SIZES}, name))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_rows_of_several_documents_are_refused() -> None:
    tokens = torch.randint(4, 50, (ROWS, LENGTH))
    with pytest.raises(
        JobError, match="GPTNeoXForCausalLM is cut by the general rule and takes no positions"
    ):
        travelling("gpt_neox", tokens, torch.ones_like(tokens), torch.zeros_like(tokens))
