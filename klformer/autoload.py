"""After `import klformer` the Auto classes of transformers know the folders of converted models.

`import klformer` does not import transformers: its table of configs is told when it is imported, or at once if it is
there already.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

TABLE = "transformers.models.auto.configuration_auto"
#: The `model_type` of saved models.
MODEL_TYPE = "klformer"


def register() -> None:
    """Have the Auto classes of transformers load converted models, from now on or as soon as they are imported."""
    if TABLE in sys.modules:
        _tell(sys.modules[TABLE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the table of configs as everybody else would, and tells it when it has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                _tell(module)

            spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


def _tell(table: Any) -> None:
    # transformers may be half imported here: nothing that needs the rest of it is imported before a folder is read.
    members = {"__module__": __name__, "model_type": MODEL_TYPE, "from_dict": classmethod(_read_config)}
    table.CONFIG_MAPPING.register(MODEL_TYPE, type("KlformerConfig", (table.PreTrainedConfig,), members), exist_ok=True)


def _read_config(_: type, content: dict[str, Any], /, **others: Any) -> Any:
    from klformer.conversion.hf.classes import read_config

    return read_config(content, **others)
