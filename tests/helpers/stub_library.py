"""Shared libraries built on the spot: libcupti as a machine may have it, without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

RESULT_STRING = """
int cuptiGetResultString(int result, const char **text) { *text = "CUPTI_ERROR_STUB"; return 0; }
"""


def build(path: Path, returns: Mapping[str, int], *, version: int = 130000) -> Path:
    """A library at ``path`` whose functions note that they were called and give these results.

    ``called(path)`` tells the functions called, in order.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    lines = ["#include <string.h>", "static char log_[4096];", "const char *stub_log(void) { return log_; }"]
    for name, result in returns.items():
        if name == "cuptiGetResultString":
            lines.append(RESULT_STRING)
            continue
        effect = f"*(unsigned *)a = {version}u;" if name == "cuptiGetVersion" else ""
        lines.append(f'int {name}(void *a) {{ strcat(log_, "{name} "); {effect} return {result}; }}')
    source = path.parent / f"{path.name}.c"
    source.write_text("\n".join(lines))
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", path, source], check=True, timeout=120)
    return path


def called(path: Path) -> list[str]:
    """Functions of the library that were called so far."""
    log = ctypes.CDLL(str(path)).stub_log
    log.restype = ctypes.c_char_p
    return bytes(log()).decode().split()
