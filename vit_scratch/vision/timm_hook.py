"""Registers our presets with timm when timm is imported, before or after this package.

timm takes longer to import than all of this package, and most uses of it need no timm, so it is not imported here.
"""

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register() -> None:
    """Import the module that registers the presets."""
    importlib.import_module("vit_scratch.vision.timm_models")


class AfterTimm(MetaPathFinder):
    """Finds timm where it is, and calls `register` when it has been imported."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module's own spec, with a loader that goes on to `register`; None for all modules but timm."""
        if fullname != "timm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if "timm" in sys.modules:
    register()
else:
    sys.meta_path.insert(0, AfterTimm())
