"""The benchmarks are no part of what is installed: import them from the checkout, and nothing else from there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from helpers.package_source import ROOT


def load(module: str) -> ModuleType:
    """``benchmarks.<module>``."""
    if "benchmarks" not in sys.modules:
        folder = ROOT / "benchmarks"
        spec = importlib.util.spec_from_file_location(
            "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        package = sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    return importlib.import_module(f"benchmarks.{module}")
