import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert not {"torch", "ray"} & set(sys.modules), name
"""


def test_no_planner_module_drags_in_torch_or_ray():
    files = sorted((ROOT / "planner").rglob("*.py"))
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if file.name not in ("__init__.py", "actor.py")
    ]
    assert "planner.schedules.registry" in modules
    subprocess.run([sys.executable, "-c", SCRIPT, *modules], cwd=ROOT, check=True)
