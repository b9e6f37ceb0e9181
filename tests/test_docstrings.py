"""Every public name is in the reference, and its docstring says what it takes, what it raises, and shows an example.

Public is what the reference lists. It must list all that the packages for users export.
The same holds for the public methods of public classes. Their examples may be in the docstring of the class, or of
another method of it. What is overridden may be described where it comes from.
"""

import ast
import doctest
import inspect
import re
import textwrap
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal, get_origin

import pytest
from torch import nn

from klformer.attention.registry import ATTENTIONS
from klformer.kernels import SPECTRA
from klformer.lab.tasks import TASKS
from klformer.ops.spectral_product import BACKENDS

ROOT = Path(__file__).parents[1]
REFERENCE = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
LISTED = re.findall(r"^::: (\S+)$", REFERENCE, flags=re.MULTILINE)
#: Packages whose names are for users, all of them.
PACKAGES = (
    "klformer",
    "klformer.attention",
    "klformer.conversion",
    "klformer.lab.data",
    "klformer.distributed",
    "klformer.kernels",
    "klformer.models",
    "klformer.nn",
    "klformer.ops.spectral_product",
    "klformer.lab.tasks",
    "klformer.lab.tokens",
    "klformer.lab.training.objectives",
)
#: Errors that training raises for itself: nobody else sees them.
INTERNAL = ("klformer.errors.OtherProcessFailedError", "klformer.errors.Interrupted")


@cache
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


def exported():
    """Names that packages for users export, and all errors; a choice of words has no docstring of its own."""
    for package in PACKAGES:
        yield from (f"{package}.{name}" for name in import_module(package).__all__)
    for name, thing in vars(import_module("klformer.errors")).items():
        if inspect.isclass(thing) and issubclass(thing, Exception):
            yield f"klformer.errors.{name}"


EXPORTED = sorted({name for name in exported() if get_origin(found(name)) is not Literal} - {*INTERNAL})
PUBLIC = sorted({*LISTED, *EXPORTED})
every_name = pytest.mark.parametrize("name", PUBLIC)


def documented(text, parameters):
    """The parameters that a docstring has no line for."""
    return [name for name in parameters if not re.search(rf"^\s*\**{re.escape(name)}\**:", text, flags=re.MULTILINE)]


def parameters_of(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def example_of(thing, name=""):
    return doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", {}, name, None, None)


def run_example(example):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said = []
    runner.run(example, out=said.append)
    assert not runner.failures, "".join(said)


def own_classes(cls):
    """The class and its bases that klformer has, the nearest first."""
    return [each for each in cls.__mro__ if each.__module__.startswith("klformer")]


def public_methods(cls):
    """Public methods by name that klformer defines; not the hooks of torch and pydantic, of which `forward` counts."""
    strangers = [each for each in cls.__mro__ if each not in own_classes(cls)]
    methods = {}
    for name, member in (pair for each in reversed(own_classes(cls)) for pair in vars(each).items()):
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        is_hook = name != "forward" and any(name in vars(each) for each in strangers)
        if inspect.isfunction(function) and not name.startswith("_") and not is_hook:
            methods[name] = function
    return methods


def raises(function):
    """Whether the body of a function raises; what it calls is not looked at."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


@cache
def shown_code(cls):
    """All that the examples of a class, of its bases and of their methods run."""
    things = own_classes(cls) + [getattr(cls, name) for name in public_methods(cls)]
    examples = (each for thing in things for each in example_of(thing).examples)
    return "\n".join(each.source for each in examples if doctest.SKIP not in each.options)


CLASSES = [name for name in PUBLIC if inspect.isclass(found(name))]
METHODS = [(name, method) for name in CLASSES for method in public_methods(found(name))]
every_method = pytest.mark.parametrize(("name", "method"), METHODS)


@pytest.fixture
def registries(monkeypatch):
    """What an example registers is forgotten afterwards."""
    for registry in (ATTENTIONS, BACKENDS, SPECTRA, TASKS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.parametrize("name", EXPORTED)
def test_it_is_in_the_reference(name):
    """By this name or another: what the parts make is exported by the whole as well."""
    assert any(found(name) is found(listed) for listed in LISTED)


def test_a_name_is_listed_once():
    assert len(LISTED) == len(set(LISTED))


@every_name
@pytest.mark.usefixtures("home", "registries")
def test_its_example_runs(name):
    thing = found(name)
    example = example_of(thing, name)
    assert example.examples, "there is no example"
    assert not all(doctest.SKIP in each.options for each in example.examples), "nothing of the example is run"
    run_example(example)


@pytest.mark.parametrize(
    ("name", "method"), [pair for pair in METHODS if ">>>" in (public_methods(found(pair[0]))[pair[1]].__doc__ or "")]
)
@pytest.mark.usefixtures("home", "registries")
def test_the_example_of_a_method_runs(name, method):
    run_example(example_of(getattr(found(name), method), f"{name}.{method}"))


@every_method
def test_a_method_has_an_example(name, method):
    """It is called, or implemented; `forward` of a module is what calling the module calls."""
    cls = found(name)
    if method == "forward" and issubclass(cls, nn.Module):
        return
    assert re.search(rf"(\.|def ){method}\(", shown_code(cls)), f"no example of {name} calls {method}"


@every_method
def test_a_method_is_described(name, method):
    cls = found(name)
    function, text = public_methods(cls)[method], inspect.getdoc(getattr(cls, method)) or ""
    assert text, "it has no docstring"
    assert not documented(text, parameters_of(function))
    assert "Raises:" in text or not raises(function), "it does not say what it raises"
    if getattr(function, "__isabstractmethod__", False):
        assert "Returns:" in text or function.__annotations__["return"] is None, "it does not say what it returns"


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
    elif inspect.isfunction(thing):
        text = inspect.getdoc(thing) or ""
        assert not documented(text, parameters_of(thing))
        assert "Raises:" in text or not raises(thing), "it does not say what it raises"
