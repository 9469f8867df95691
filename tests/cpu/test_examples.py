"""Every example runs by itself and asserts its own result."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.package_source import ROOT

# Warnings are errors here as well, but for one that torch 2.13 gives when it imports Inductor.
WARNINGS = ["-W", "error", "-W", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_example(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *WARNINGS, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_example_says_what_it_shows(script: Path) -> None:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    assert "The concept:" in (ast.get_docstring(tree) or "")
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert "main" in names


def test_examples_are_numbered_without_gaps() -> None:
    assert [int(script.name[:2]) for script in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))
