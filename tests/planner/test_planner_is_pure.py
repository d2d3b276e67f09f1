import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert not {"torch", "ray"} & set(sys.modules), name
"""


def test_no_planner_module_imports_torch_or_ray():
    files = sorted((ROOT / "planner").rglob("*.py"))
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if file.name not in ("__init__.py", "actor.py")
    ]
    assert "planner.schedule.registry" in modules
    subprocess.run([sys.executable, "-c", SCRIPT, *modules], cwd=ROOT, check=True)


def test_the_import_contract_names_every_planner_module_that_is_no_leaf():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [c for c in contracts if c["name"] == "workers take only the leaf modules of the planner"]
    files = (ROOT / "planner").iterdir()
    modules = {f"planner.{file.stem}" for file in files if file.suffix == ".py" or file.is_dir()}
    leaves = {
        f"planner.{name}"
        for name in (
            "__init__",
            "__pycache__",
            "ir",
            "lowering",
            "rank_program",
            "final_gradients",
            "course",
            "host_copies",
            "plan",
            "codec",
            "shares",
            "rounds",
            "shards",
            "profile",
            "observed",
            "features",
            "freezing",
            "wording",
            "arrivals",
            "accelerators",
        )
    }
    assert set(contract["forbidden_modules"]) == modules - leaves
