"""Random programs and call sequences: eager against the backend on HostGraph.

GRAPHCAP_RANDOM_PROGRAMS sets how many programs run, GRAPHCAP_RANDOM_FIRST the seed of the first.
"""

from __future__ import annotations

import os

import pytest
import torch
from helpers.random_runs import run_programs

# torch 2.14's Dynamo asks inputs that are no leaves for their gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

PROGRAMS = int(os.environ.get("GRAPHCAP_RANDOM_PROGRAMS", "200"))
FIRST = int(os.environ.get("GRAPHCAP_RANDOM_FIRST", "0"))
CHUNK = 20
SEQUENCES = 4
"""Of each program: a call costs a hundredth of what compiling does."""
GENERATED = 6
"""Programs for which Inductor generates kernels, which takes seconds."""


@pytest.mark.parametrize("first", range(FIRST, FIRST + PROGRAMS, CHUNK))
def test_programs_of_torch_operators(first: int) -> None:
    seeds = range(first, min(first + CHUNK, FIRST + PROGRAMS))
    tally = run_programs(seeds, "cpu", generate=False, sequences=SEQUENCES)
    assert tally.like_inductor <= len(seeds) // 5, tally
    assert len(seeds) < CHUNK or tally.replayed > 0.7, tally


@pytest.mark.parametrize("seed", range(FIRST, FIRST + min(PROGRAMS, GENERATED)))
def test_program_of_generated_kernels(seed: int) -> None:
    tally = run_programs([seed], "cpu", generate=True, sequences=12)
    if tally.like_inductor:
        pytest.skip(
            f"needs a torch whose own compile gives eager's values for this program; {torch.__version__} does not"
        )
    assert tally.replayed > 0.5, tally
