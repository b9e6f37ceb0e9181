"""Imports go one way through the package."""

import ast
from pathlib import Path

import klformer

PACKAGE = Path(klformer.__file__).parent
#: Each room may import from those before it.
LEAVES = ["errors", "checks", "registry", "config", "files", "memory", "environment", "noise"]
LEAVES += ["plotting", "plugins", "terminal"]
MODEL = ["ops", "kernels", "attention", "nn", "models", "distributed", "conversion"]
RUN = ["data", "tokens", "training", "tasks", "runs"]
ORDER = [*LEAVES, *MODEL, *RUN, "bench", "analysis", "report", "cli", "testing"]


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "klformer":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("klformer."))


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_go_one_way():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = room_of(path)
        if room in ("__init__", "__main__"):
            continue
        assert room in ORDER, f"{path} is in no room"
        allowed = ORDER[: ORDER.index(room) + 1]
        name = path.relative_to(PACKAGE)
        wrong += [f"{name} imports {target}" for target in imports_of(path) if target not in allowed]
    assert not wrong


def test_oracles_are_for_tests_and_analysis():
    users = [p for p in PACKAGE.rglob("*.py") if "import reference" in p.read_text()]
    assert {room_of(p) for p in users} <= {"analysis"}


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
