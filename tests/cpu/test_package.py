"""The installed package: its version, and the entry point through which torch finds the backend."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import graphcap_backend


def test_version_is_the_distribution_s() -> None:
    assert graphcap_backend.__version__ == version("graphcap-backend")


def test_entry_point_names_the_backend_function() -> None:
    (found,) = entry_points(group="torch_dynamo_backends", name="graphcap")
    from graphcap_backend.backend import graphcap

    assert found.load() is graphcap


def test_backend_by_name_without_an_import(tmp_path: Path) -> None:
    program = """
import sys, torch
compiled = torch.compile(lambda x: x * 2 + 1, backend="graphcap")
assert compiled(torch.ones(3)).tolist() == [3, 3, 3]
assert "graphcap_backend.backend" in sys.modules
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
