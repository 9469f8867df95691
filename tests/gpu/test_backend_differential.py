"""Random programs and call sequences: eager against the backend on CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from helpers.backend_calls import fresh_compiler, parts
from helpers.random_programs import run_program

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

PROGRAMS = int(os.environ.get("GRAPHCAP_RANDOM_PROGRAMS", "24"))
SEQUENCES = 100


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with fresh_compiler():
        yield


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_program(seed: int) -> None:
    fast = run_program(seed, "cuda", sequences=SEQUENCES)
    found = parts(fast)
    assert sum(part.num_replays for part in found) > sum(sum(part.fallbacks.values()) for part in found)
