"""Every command of Freshet's and Ray's in `deploy/` and in docs/deploy.md is one that they take."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from command_lines import RefusedError, check, in_shell, is_ours
from deployment import DEPLOY, PAGE, ROOT, files, strings

from orchestrator.spec.job_spec import Spec


def commands(path: Path) -> Iterator[list[str]]:
    text = path.read_text()
    if path.suffix == ".yaml":
        for value in yaml.safe_load_all(text):
            for found in strings(value):
                yield from in_shell(found)
            yield from filter(is_ours, lists(value))
    elif path.suffix == ".service":
        yield from in_shell("\n".join(re.findall(r"^Exec\w+=-?(.*)", text, re.MULTILINE)))
    elif path.suffix == ".sh":
        yield from in_shell(text)
    elif path.suffix == ".md":
        yield from in_shell("\n".join(re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)))
    elif path.name == "Dockerfile":
        yield from filter(
            is_ours, (yaml.safe_load(line) for line in re.findall(r"^CMD (\[.*\])$", text, re.M))
        )


def lists(value: object) -> Iterator[list[str]]:
    """Every list of texts in a YAML value: a command that no shell reads."""
    if isinstance(value, dict):
        for part in value.values():
            yield from lists(part)
    elif isinstance(value, list):
        if len(value) > 1 and all(isinstance(word, str) for word in value):
            yield [word for word in value if isinstance(word, str)]
        for part in value:
            yield from lists(part)


FOUND = sorted(
    {(str(path.relative_to(ROOT)), tuple(words)) for path in [PAGE, *files()] for words in commands(path)}
)


@pytest.mark.parametrize(
    ("file", "words"), FOUND, ids=lambda part: " ".join(part) if isinstance(part, tuple) else part
)
def test_the_command_line_takes_it(file: str, words: tuple[str, ...]) -> None:
    check(list(words))


def test_commands_are_found_wherever_one_is_typed() -> None:
    found = {file for file, _ in FOUND}
    assert found == {
        "docs/deploy.md",
        "deploy/Dockerfile",
        "deploy/compose.yaml",
        "deploy/kubernetes/rayjob.yaml",
        "deploy/kubernetes/service.yaml",
        "deploy/leave.sh",
        "deploy/ray-up/aws.yaml",
        "deploy/ray-up/gcp.yaml",
        "deploy/skypilot/train.yaml",
        "deploy/systemd/freshet-head.service",
        "deploy/systemd/freshet-service.service",
        "deploy/systemd/freshet-worker.service",
    }
    programs = {words[:2] for _, words in FOUND if words[0] == "ray"}
    assert {("ray", "start"), ("ray", "job"), ("ray", "up"), ("ray", "drain-node")} <= programs


@pytest.mark.parametrize(
    "line",
    [
        "ray start --hed",
        "ray strat --head",
        "ray job submit --working-dir . -- python -m orchestrator train x.toml --sett a.b=1",
        "ray drain-node --reason=TIRED --reason-message=x",
        "freshet dashboard --prot 8270",
        "freshet dashbord",
        "freshet train x.toml --resumed",
    ],
)
def test_a_slip_is_caught(line: str) -> None:
    (words,) = in_shell(line)
    with pytest.raises(RefusedError):
        check(words)


def test_a_key_that_no_spec_has_is_caught() -> None:
    (words,) = in_shell("sudo true; FOO=1 python -m orchestrator train x.toml --set cluster.adress=auto")
    with pytest.raises(ValueError, match="adress"):
        check(words)


def test_the_spec_takes_the_settings_that_the_page_shows() -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        Spec.model_validate({"job": {"name": "any"}, **tomllib.loads(block)})


def test_files_that_the_page_and_the_manifests_name_exist() -> None:
    named = {
        name
        for path in [PAGE, *files()]
        for name in re.findall(r"\bdeploy/[\w./-]*\w", path.read_text())
        if path.name != "Dockerfile.dockerignore"
    }
    assert not sorted(name for name in named if not (ROOT / name).exists())
    assert len(named) > 10


def test_the_page_walks_through_every_file() -> None:
    page = PAGE.read_text()
    missing = [
        str(file.relative_to(ROOT))
        for file in files()
        if f"deploy/{file.relative_to(DEPLOY)}" not in page and f"`{file.name}`" not in page
    ]
    assert not missing
