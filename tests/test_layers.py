"""Imports go one way through the package."""

import ast
import sys
from pathlib import Path

import klformer
from klformer.lab import MODULES

PACKAGE = Path(klformer.__file__).parent
#: Each room may import from those before it. First the library, then the laboratory.
LEAVES = ["errors", "checks", "registry", "config", "files", "memory", "noise", "plugins"]
LIBRARY = [*LEAVES, "ops", "kernels", "attention", "nn", "models", "distributed", "conversion", "testing"]
LAB = ["environment", "terminal", "plotting", "data", "tokens", "training", "tasks", "runs"]
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


def test_oracles_are_for_tests_and_analysis():
    users = [p for p in PACKAGE.rglob("*.py") if "import reference" in p.read_text()]
    assert {room_of(p) for p in users} <= {"lab.analysis"}


def test_the_laboratory_names_its_packages():
    """What klformer.lab asks for is what its files import beyond the library's packages: no more, no less."""
    imported = {name for path in (PACKAGE / "lab").rglob("*.py") for name in modules_of(path)}
    others = {"klformer", "torch", "safetensors", "pydantic", "markupsafe", "cycler"}  # of jinja2, of matplotlib
    assert imported - set(sys.stdlib_module_names) - others == set(MODULES)


def test_the_library_imports_three_packages():
    files = [path for path in PACKAGE.rglob("*.py") if not room_of(path).startswith("lab")]
    imported = {name for path in files for name in modules_of(path)} - set(sys.stdlib_module_names)
    where_used = {"numpy", "pyarrow", "pytest", "transformers"}  # types, tables of texts, contracts, conversion
    assert imported == {"klformer", "torch", "safetensors", "pydantic"} | where_used


def test_transformers_is_imported_in_one_folder():
    users = [p for p in PACKAGE.rglob("*.py") if "transformers" in modules_of(p)]
    assert users
    assert all(p.parent == PACKAGE / "conversion" / "hf" for p in users)


def modules_of(path):
    """The packages that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
    return names
