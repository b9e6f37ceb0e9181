"""Imports go one way through the houses, and each keeps to its size."""

import ast
import re
import sys
from pathlib import Path

import pytest

import klformer
from klformer.lab import MODULES

PACKAGE = Path(klformer.__file__).parent
ROOT = Path(__file__).parents[1]
#: Each room may import from those before it. First the library, then the laboratory.
LEAVES = ["errors", "checks", "registry", "config", "files", "memory", "noise", "plugins"]
LIBRARY = [*LEAVES, "ops", "kernels", "attention", "nn", "models", "distributed", "conversion", "testing", "autoload"]
LAB = ["environment", "terminal", "tables", "plotting", "data", "tokens", "training", "tasks", "runs"]
LAB += ["bench", "analysis", "report", "cli"]
ORDER = [*LIBRARY, *(f"lab.{room}" for room in LAB)]


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "klformer":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("klformer.")]
        else:
            continue
        yield from {room_in(name.split(".")[1:]) for name in names}


def room_in(parts):
    return ".".join(parts[:2] if parts[0] == "lab" else parts[:1])


def room_of(path):
    return room_in(path.relative_to(PACKAGE).with_suffix("").parts)


def test_imports_go_one_way():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = room_of(path)
        if room in ("__init__", "__main__", "lab.__init__"):
            continue
        assert room in ORDER, f"{path} is in no room"
        allowed = ORDER[: ORDER.index(room) + 1]
        name = path.relative_to(PACKAGE)
        wrong += [f"{name} imports {target}" for target in imports_of(path) if target not in allowed]
    assert not wrong


def test_nothing_installed_imports_what_is_not():
    """research/ and benchmarks/ import the package; nothing of it names them, nor does benchmarks/ name research/."""
    wrong = [path for path in PACKAGE.rglob("*.py") if modules_of(path) & {"research", "benchmarks", "docs", "tests"}]
    wrong += [path for path in (ROOT / "benchmarks").rglob("*.py") if "research" in modules_of(path)]
    assert not wrong


def test_nothing_installed_names_what_is_not():
    """What is installed is there without this repository: its pages and tests are not."""
    elsewhere = re.compile(r"\b(docs|tests|research|benchmarks|examples)/\w")
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json", ".j2")]
    assert not [str(path) for path in files if elsewhere.search(path.read_text())]


#: Counted apart, and in no folder above it.
APART = PACKAGE / "ops" / "triton"
#: Lines of Python that a folder may have, in tens. A change that needs more says what they replace.
BUDGETS = {
    "klformer": 40_540,
    "klformer/lab": 21_430,
    "klformer/ops": 7_020,  # without the kernels for GPUs
    "klformer/ops/triton": 2_050,
    "klformer/kernels": 1_270,
    "klformer/attention": 3_060,
    "klformer/nn": 230,
    "klformer/models": 1_460,
    "klformer/conversion": 3_640,
    "klformer/distributed": 430,
    "klformer/testing": 970,
    "klformer/lab/analysis": 2_040,
    "klformer/lab/bench": 2_700,
    "klformer/lab/cli": 2_340,
    "klformer/lab/data": 650,
    "klformer/lab/report": 2_570,
    "klformer/lab/runs": 2_590,
    "klformer/lab/tasks": 4_600,
    "klformer/lab/tokens": 410,
    "klformer/lab/training": 3_160,
    "research": 4_180,
    "benchmarks": 1_000,
}


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_keeps_to_its_budget(folder):
    files = [path for path in (ROOT / folder).rglob("*.py") if APART not in path.parents or ROOT / folder == APART]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert 0 < lines <= BUDGETS[folder]


def test_oracles_are_for_tests():
    assert not [p for p in PACKAGE.rglob("*.py") if "import reference" in p.read_text()]


def test_the_laboratory_names_its_packages():
    """What klformer.lab asks for is what its files import beyond the library's packages: no more, no less."""
    imported = {name for path in (PACKAGE / "lab").rglob("*.py") for name in modules_of(path)}
    others = {"klformer", "torch", "safetensors", "pydantic", "markupsafe", "cycler"}  # of jinja2, of matplotlib
    assert imported - set(sys.stdlib_module_names) - others == set(MODULES)


def test_the_library_imports_three_packages():
    files = [path for path in PACKAGE.rglob("*.py") if not room_of(path).startswith("lab")]
    imported = {name for path in files for name in modules_of(path)} - set(sys.stdlib_module_names)
    # Types, contracts, conversion, kernels for GPUs.
    where_used = {"numpy", "pytest", "transformers", "triton"}
    assert imported == {"klformer", "torch", "safetensors", "pydantic"} | where_used


def test_transformers_is_imported_in_one_folder():
    users = [p for p in PACKAGE.rglob("*.py") if "transformers" in modules_of(p)]
    assert users
    assert all(p.parent == PACKAGE / "conversion" / "hf" for p in users)


def test_triton_is_imported_in_one_folder():
    assert {p.parent for p in PACKAGE.rglob("*.py") if "triton" in modules_of(p)} == {APART}


def modules_of(path):
    """The packages that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
    return names
