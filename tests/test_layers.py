"""Imports go one way through the package."""

import ast
from pathlib import Path

import klformer

PACKAGE = Path(klformer.__file__).parent
#: Each layer may import from those before it. What stands outside the order may be imported by all.
ORDER = ["ops", "kernels", "attention", "models", "training", "analysis", "bench", "experiments", "cli"]
LEAVES = {"checks", "plotting", "registry", "subcommands"}
ALONE = {"tasks"}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "klformer":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("klformer."))


def layer_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_go_one_way():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        layer = layer_of(path)
        if layer in ("__init__", "__main__"):
            continue
        for target in imports_of(path):
            if layer in ALONE or layer in LEAVES:
                allowed = target in LEAVES or target == layer
            else:
                assert layer in ORDER, f"{path} is in no layer"
                below = ORDER[: ORDER.index(layer) + 1]
                # Tasks are data: whoever runs something may read them.
                allowed = (
                    target in below
                    or target in LEAVES
                    or (target in ALONE and ORDER.index(layer) >= ORDER.index("training"))
                )
            if not allowed:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {target}")
    assert not wrong


def test_oracles_are_for_tests_and_analysis():
    users = [
        p for p in PACKAGE.rglob("*.py") if "ops.reference" in p.read_text() or "import reference" in p.read_text()
    ]
    assert {layer_of(p) for p in users} <= {"analysis"}
