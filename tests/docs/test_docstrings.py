"""Every public name is in the reference, and its docstring says what it takes, what it raises, and shows an example."""

import doctest
import inspect
import re
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

import pytest

import klformer
import klformer.conversion
import klformer.kernels
import klformer.nn
from klformer.attention.registry import ATTENTIONS
from klformer.kernels import SPECTRA
from klformer.tasks import TASKS

ROOT = Path(__file__).parents[2]
REFERENCE = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
LISTED = re.findall(r"^::: (\S+)$", REFERENCE, flags=re.MULTILINE)
PUBLIC = sorted({*LISTED, *(f"klformer.{name}" for name in klformer.__all__), "klformer.nn.MultiheadAttention"})
every_name = pytest.mark.parametrize("name", PUBLIC)


def found(name):
    """The object that a dotted name means, and the name of its module."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(name)


def documented(text, parameters):
    """The parameters that a docstring has no line for."""
    return [name for name in parameters if not re.search(rf"^\s*\**{re.escape(name)}\**:", text, flags=re.MULTILINE)]


def parameters_of(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


@every_name
def test_it_is_in_the_reference(name):
    assert name in LISTED


@every_name
def test_its_example_runs(name, home, monkeypatch):
    for registry in (ATTENTIONS, SPECTRA, TASKS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    text = inspect.getdoc(found(name)) or ""
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert example.examples, "there is no example"
    assert not all(doctest.SKIP in each.options for each in example.examples), "nothing of the example is run"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said = []
    runner.run(example, out=said.append)
    assert not runner.failures, "".join(said)


@every_name
def test_its_arguments_are_described(name):
    thing = found(name)
    if inspect.isclass(thing):
        own = thing.__dict__.get("__init__")
        # Fields of configurations and of results have docstrings of their own.
        has_fields = hasattr(thing, "model_fields") or is_dataclass(thing)
        text = inspect.getdoc(thing) or ""
        if not has_fields and own is not None and not getattr(own, "__isabstractmethod__", False):
            assert not documented(text, parameters_of(own))
        for method, function in vars(thing).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                assert inspect.getdoc(getattr(thing, method)), f"{method} has no docstring"
    elif inspect.isfunction(thing):
        text = inspect.getdoc(thing) or ""
        assert not documented(text, parameters_of(thing))
        assert "Raises:" in text or not parameters_of(thing), "it does not say what it raises"
