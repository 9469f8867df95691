"""The package's own source, as the structure tests read it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "graphcap_backend"


@dataclass(frozen=True)
class SourceFile:
    """One module of the package. ``name`` is relative to the package: "capture.nodes", "" for its __init__."""

    name: str
    path: Path

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def imports(self) -> Iterator[str]:
        """Full names of all that is imported, anywhere in the file: "a.b" and "a.b.c" for ``from a.b import c``."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.where}:{node.lineno}: relative import; the package writes full names"
                yield str(node.module)
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def attributes(self) -> Iterator[str]:
        """Dotted names that are read, as written: "torch._inductor.config"."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                yield ast.unparse(node)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def package_files() -> list[SourceFile]:
    """Every module of the package in this checkout, sorted by path."""
    base = ROOT / PACKAGE
    files = []
    for path in sorted(base.rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        files.append(SourceFile(".".join(part for part in parts if part != "__init__"), path))
    return files
