"""Plugins: modules of other people that register attentions, kernels or tasks when they are imported.

They are named before a command (`klformer --plugin MODULE COMMAND ...`), in the environment variable KLFORMER_PLUGINS
with commas between them, or by installed packages as entry points of the group `klformer.plugins`. The environment
variable is also how a command tells its plugins to the processes that it starts.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from types import ModuleType, TracebackType

from klformer.errors import ArgumentError, UserError

ENTRY_POINTS = "klformer.plugins"
ENVIRONMENT = "KLFORMER_PLUGINS"


class PluginError(UserError):
    """A plugin has failed while it was imported. The cause is its own error, with a traceback that starts in it."""

    def __init__(self, plugin: str, cause: BaseException) -> None:
        super().__init__(f"the plugin {plugin} failed: {type(cause).__name__}: {cause}")
        self.__cause__ = cause.with_traceback(_inside_plugin(cause.__traceback__))


def load_plugin(name: str) -> ModuleType:
    """Import a plugin, unless that is done already.

    Args:
        name: A module as in an import, looked for in the current folder too, or the path of a file that ends in .py.

    Raises:
        ArgumentError: there is no such module or file.
        PluginError: the plugin itself has failed.
    """
    if not name.strip(" .") or "," in name or "\0" in name:
        raise ArgumentError(f"a plugin must be a module or a file ending in .py, without a comma or null, got {name!r}")
    spec = _spec_of_file(Path(name)) if name.endswith(".py") else _spec_of_module(name)
    if (known := _imported_already(spec)) is not None:
        return known
    try:
        return _import_file(spec) if name.endswith(".py") else import_module(name)
    except (Exception, SystemExit) as error:
        raise PluginError(repr(name), error) from error


def load_plugins(names: Sequence[str] = ()) -> None:
    """Import the plugins of installed packages, those of the environment, and those that are named.

    Processes that are started from now on get the same.

    Raises:
        ArgumentError: there is no such module or file.
        PluginError: a plugin has failed; the message names it.
    """
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except (Exception, SystemExit) as error:
            package = "an unknown package" if entry.dist is None else f"the package {entry.dist.name!r}"
            raise PluginError(f"{entry.value!r}, which {package} brings,", error) from error
    of_environment = [name.strip() for name in os.environ.get(ENVIRONMENT, "").split(",") if name.strip()]
    chosen = [*of_environment, *names]
    for name in chosen:
        load_plugin(name)
    if chosen:
        os.environ[ENVIRONMENT] = ",".join(dict.fromkeys(map(_absolute, chosen)))


def _absolute(name: str) -> str:
    """The name as a process in another folder understands it."""
    return str(Path(name).expanduser().absolute()) if name.endswith(".py") else name


def _spec_of_file(path: Path) -> ModuleSpec:
    file = path.expanduser().resolve()
    spec = spec_from_file_location(_name_of_file(file), file)
    if spec is None or not file.is_file():
        raise ArgumentError(f"there is no plugin {str(path)!r}: no file {file}")
    return spec


def _name_of_file(file: Path) -> str:
    """Return the name that the module of a file gets: random.py must not take the place of Python's."""
    return f"klformer_plugin_{file.stem}"


def _spec_of_module(name: str) -> ModuleSpec:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        spec = find_spec(name)
    except ModuleNotFoundError as error:
        # The packages above it are imported by this; what they lack is their own error.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise PluginError(repr(name), error) from error
        spec = None
    except (Exception, SystemExit) as error:
        raise PluginError(repr(name), error) from error
    if spec is None:
        raise ArgumentError(
            f"there is no plugin {name!r}: no module of that name is installed or in {here}; "
            "a file is named with its ending: path/to/file.py"
        )
    return spec


def _imported_already(spec: ModuleSpec) -> ModuleType | None:
    """The module of the same file: a plugin may be named as a module and as a file, and must not register twice."""
    if spec.origin is None:
        return None
    file, name = os.path.realpath(spec.origin), os.path.basename(spec.origin)
    for module in list(sys.modules.values()):
        known = getattr(module, "__spec__", None)
        origin = known.origin if isinstance(known, ModuleSpec) and known.has_location else None
        if origin is not None and os.path.basename(origin) == name and os.path.realpath(origin) == file:
            return module
    return None


def _import_file(spec: ModuleSpec) -> ModuleType:
    assert spec.loader is not None, "a file that ends in .py has a loader"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def plugin_in(traceback: TracebackType | None) -> str | None:
    """Return the name of the plugin whose code a traceback goes through; None if there is none."""
    frames = [os.path.realpath(frame.f_code.co_filename) for frame, _ in walk_tb(traceback)]
    for name in filter(None, os.environ.get(ENVIRONMENT, "").split(",")):
        module = sys.modules.get(_name_of_file(Path(name)) if name.endswith(".py") else name)
        file = getattr(module, "__file__", None)
        if file is None:
            continue
        place = os.path.realpath(os.path.dirname(file) if os.path.basename(file) == "__init__.py" else file)
        if any(frame == place or frame.startswith(f"{place}{os.sep}") for frame in frames):
            return name
    return None


def _inside_plugin(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the machinery of imports at its beginning."""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file != __file__ and "importlib" not in file:
            return traceback
        traceback = traceback.tb_next
    return None
