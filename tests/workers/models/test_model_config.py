"""`[model]` as a union of families: what earlier versions wrote, what goes over the wire, where a family is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jobs import small_config
from pydantic import ValidationError

from orchestrator.analysis.job_summary import model_text
from orchestrator.spec.job_spec import JobConfig, Spec
from workers.checkpoint.coordination import manifest_mismatch
from workers.checkpoint.manifest import Manifest
from workers.config import ModelConfig
from workers.models.model_config import FAMILIES, AnyModel, families

ROOT = Path(__file__).parents[3]
EARLIER = {
    "family": None,
    "factory": None,
    "arguments": {},
    "weights": None,
    "weights_sha256": None,
    "layers": 8,
    "width": 128,
    "heads": 4,
    "kv_heads": None,
    "context": 128,
    "vocabulary": None,
    "hidden": None,
    "dropout": 0.0,
    "tied_embeddings": False,
    "image_size": 8,
    "patch_size": 2,
    "channels": 1,
    "classes": 10,
}
"""A section as it was written when each had the keys of all families."""
OWN: list[dict[str, Any]] = [
    {"family": "gpt", "layers": 4, "width": 16, "heads": 2, "context": 16, "vocabulary": 256},
    {"family": "llama", "layers": 4, "kv_heads": 2, "vocabulary": 256, "tied_embeddings": True},
    {"family": "vit", "layers": 2, "width": 32, "patch_size": 4},
    {"factory": "a.b:c", "arguments": {"width": 3}, "context": 16, "vocabulary": 256},
]
"""One model of each family, without what it leaves at its default."""
each_model = pytest.mark.parametrize("own", OWN, ids=lambda own: own.get("family", "factory"))


@each_model
def test_what_earlier_versions_wrote_is_read(own: dict[str, Any]) -> None:
    model = ModelConfig(**own)
    assert ModelConfig(**{**EARLIER, **own}) == model
    # Each family ignored the settings of others.
    ignored = {"image_size": 16, "kv_heads": 3, "layers": 5, "classes": 7, "tied_embeddings": True}
    others = {key: value for key, value in ignored.items() if key not in type(model).model_fields}
    assert len(others) >= 2
    assert ModelConfig(**{**EARLIER, **own, **others}) == model
    spec = {"job": {"name": "old"}, "model": {**EARLIER, **own, **others}}
    assert Spec.model_validate(spec).model == model


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"family": "gpt", "factory": None, "kv_heads": 2}, "kv_heads"),
        ({"family": None, "factory": "a.b:c", "layers": 9}, "layers"),
    ],
)
def test_a_setting_of_another_family_is_refused_beside_an_unset_key(model: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        Spec.model_validate({"job": {"name": "new"}, "model": model})


@each_model
def test_a_checkpoint_of_an_earlier_version_is_resumed(own: dict[str, Any]) -> None:
    config = small_config(Path("x"), model=ModelConfig(**own))

    def mismatch(model: dict[str, Any]) -> dict[str, tuple[object, object]]:
        spec = {**config.model_dump(mode="json"), "model": model}
        manifest = Manifest(step=1, generation=1, spec=spec, plan={}, layers=(), samples=0, files={})
        return dict(manifest_mismatch(manifest, config))

    assert mismatch({**EARLIER, **own}) == {}
    assert mismatch({**EARLIER, **own, "image_size": 16, "kv_heads": 2, "context": 16}).keys() <= {
        f"model.{key}"
        for key in ("image_size", "context", "kv_heads")
        if key in type(config.model).model_fields
    }
    assert mismatch({**EARLIER, **own, "weights": "w"}) == {"model.weights": ("w", None)}


def test_a_checkpoint_of_another_family_is_not() -> None:
    config = small_config(Path("x"), model=ModelConfig(**OWN[0]))
    spec = {**config.model_dump(mode="json"), "model": ModelConfig(**OWN[2]).model_dump(mode="json")}
    manifest = Manifest(step=1, generation=1, spec=spec, plan={}, layers=(), samples=0, files={})
    assert manifest_mismatch(manifest, config)["model.family"] == ("vit", "gpt")


@each_model
@pytest.mark.parametrize("left_out", [{}, {"exclude_unset": True}, {"exclude_defaults": True}], ids=str)
def test_json_gives_the_same_section(own: dict[str, Any], left_out: dict[str, bool]) -> None:
    spec = Spec(job=JobConfig(name="a"), model=ModelConfig(**own))
    assert Spec.model_validate_json(spec.model_dump_json(**left_out)) == spec


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({**EARLIER, "family": "gpt"}, "gpt, 8 blocks, width 128, context 128"),
        ({**EARLIER, "family": "vit"}, "vit, 8 blocks, width 128"),
        ({**EARLIER, "factory": "a:b"}, "a:b"),
        ({"family": "gpt"}, "gpt"),
        ({"family": "of a later version", "layers": 3}, "of a later version, 3 blocks"),
        ({}, ""),
    ],
)
def test_a_model_in_a_few_words(model: dict[str, Any], text: str) -> None:
    assert model_text(model) == text


def test_families_are_listed_by_what_they_read() -> None:
    assert (families(), families("tokens"), families("images")) == (
        "gpt, llama, vit, vgg or huggingface",
        "gpt or llama",
        "vit or vgg",
    )


@each_model
def test_the_data_settle_the_vocabulary_of_text_alone(own: dict[str, Any]) -> None:
    model: AnyModel = ModelConfig(**{**own, "vocabulary": None} if "vocabulary" in own else own)
    settled = model.settled(vocabulary=300, weights="w.safetensors", weights_sha256="ab")
    assert settled.weights_sha256 == "ab"
    assert getattr(settled, "vocabulary", None) == (None if own.get("family") == "vit" else 300)
    assert type(model).model_validate(settled.model_dump()) == settled


def test_only_the_files_of_a_family_name_it() -> None:
    """But for the union of all families, examples of the REST interface, whose job has that name, and architectures of
    other libraries, which are called so too."""
    exempt = {"workers/models/model_config.py", "dashboard/service/problems.py"}
    for family in FAMILIES:
        naming = {
            str(file.relative_to(ROOT))
            for package in ("planner", "workers", "orchestrator", "dashboard")
            for file in (ROOT / package).rglob("*.py")
            if file.stem != family and re.search(rf"\b{family}\b", file.read_text())
        }
        elsewhere = ("dashboard/api/", "workers/models/huggingface/")
        assert {name for name in naming - exempt if not name.startswith(elsewhere)} == set()
