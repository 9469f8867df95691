"""Programs that need a process of their own: CUPTI is one a process, and remembers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PRELUDE = """
import json, threading, warnings
import torch
from graphcap_backend import (
    capture_nodes, get_kernel_annotations, get_kernel_py_stacks, graph, mark_kernels, mark_stream
)
from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.errors import CuptiBusyError, CuptiMissingError

STACKS = {"record_py_stacks": True}
WORK = ("kernel", "memcpy", "memset")

def capture(work, config=None, **options):
    g = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with graph(g, enable_annotations=True, annotation_config=config, **options):
        work()
    g.instantiate()
    assert PROCESS.callbacks is None and PROCESS.num_recording == 0 and not PROCESS.by_graph
    return g

def profiled(work, without="no such kernel"):
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    profiler.export_chrome_trace("trace.json")
    with open("trace.json") as file:
        kernels = [event for event in json.load(file)["traceEvents"] if event.get("cat") == "kernel"]
    kernels = [event for event in kernels if without not in event["name"]]
    print("kernels of the profile:", *kernels, sep="\\n")  # what a failure shows
    return len(kernels)

def functions(node):
    return [line.rpartition(":")[2] for line in (node.stack or "").splitlines()]
"""


def needs_cuda() -> None:
    """Skip where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("cuda.bindings.driver")


def run_fresh(program: str, folder: Path, prelude: str = PRELUDE) -> str:
    """Run a program in a process of its own; what it printed.

    A failed assertion of the program fails the test, with its text. The program is a file, so
    that its lines can be found in stacks; it begins with ``prelude``.
    """
    path = folder / "program.py"
    path.write_text(prelude + program)
    command = [sys.executable, str(path)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
