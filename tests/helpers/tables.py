"""How much the process remembers of captures. Other tests may have left some, so look at the difference."""

from __future__ import annotations

from typing import NamedTuple

from graphcap_backend import get_kernel_annotations, get_kernel_py_stacks
from graphcap_backend.capture.process import PROCESS


class Tables(NamedTuple):
    """Entries of the process-wide tables."""

    annotations: int
    stacks: int
    captured: int


def table_sizes() -> Tables:
    """Sizes of the tables now."""
    return Tables(len(get_kernel_annotations()), len(get_kernel_py_stacks()), len(PROCESS.captured))
