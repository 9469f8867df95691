"""libcupti as found: what is said where it is missing, and that nothing of it is loaded early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graphcap_backend
from graphcap_backend.annotate import cupti
from graphcap_backend.annotate.config import AnnotationConfig
from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.annotate.recording import Recording
from graphcap_backend.errors import CuptiError, CuptiMissingError

without_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch built without CUDA")


@without_cuda
def test_a_torch_without_cuda_says_what_was_found_and_needed() -> None:
    with pytest.raises(CuptiMissingError, match=r"found torch .* without CUDA; needed torch for CUDA"):
        cupti.version()
    assert not cupti.is_loadable()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("config", [{"backend": "cupti"}, {"record_py_stacks": True}])
def test_insisting_where_it_cannot_be_had_raises_and_leaves_nothing(config: dict[str, object]) -> None:
    for _ in range(2):
        with pytest.raises(CuptiError):
            Recording.start_cuda(AnnotationConfig.parse(config), 0)
        assert (PROCESS.num_recording, PROCESS.callbacks, PROCESS.by_graph) == (0, None, {})


def test_only_one_file_names_the_library() -> None:
    root = Path(graphcap_backend.__file__).parent
    naming = [path.name for path in root.rglob("*.py") if "libcupti.so" in path.read_text()]
    assert naming == ["cupti.py"]


def test_importing_annotate_loads_neither_inductor_nor_dynamo_nor_libcupti() -> None:
    program = """
import sys
import torch
loaded = set(sys.modules)
before = open("/proc/self/maps").read().count("libcupti")
import graphcap_backend.annotate.recording, graphcap_backend.annotate.registry, graphcap_backend.annotate.cupti
import graphcap_backend.annotate.edge_walk
new = set(sys.modules) - loaded
print(sorted(name for name in new if name.startswith(("torch._inductor", "torch._dynamo", "cuda", "cupti"))))
print(open("/proc/self/maps").read().count("libcupti") - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split("\n")[:2] == ["[]", "0"], done.stderr
