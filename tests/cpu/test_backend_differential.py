"""Random programs and call sequences: eager against the backend on HostGraph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.backend_calls import fresh_compiler, parts
from helpers.random_programs import run_program

# torch 2.14's Dynamo asks inputs that are no leaves for their gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

PROGRAMS = 14
"""Each costs some compiles of C++ code; sequences cost next to nothing."""
SEQUENCES = 24


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_program(seed: int) -> None:
    fast = run_program(seed, "cpu", sequences=SEQUENCES)
    found = parts(fast)
    assert sum(part.num_replays for part in found) > sum(sum(part.fallbacks.values()) for part in found)
