"""Models of transformers. The only folder that imports transformers; it is imported when such a model is given."""

from klformer.conversion.hf.cache import KernelCache
from klformer.conversion.hf.host import TransformersHost
from klformer.conversion.hf.saving import load_folder, save_folder

__all__ = ["KernelCache", "TransformersHost", "load_folder", "save_folder"]
