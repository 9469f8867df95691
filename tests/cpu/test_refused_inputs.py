"""Inputs that no replay can follow: refused with a reason, and the callable still answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from graphcap_backend.capture.callee import Callee, ReplayLimits
from graphcap_backend.capture.replay import Replayed
from graphcap_backend.capture.skip import SkipKind, SkipReason

HOST = torch.device("cpu")


@pytest.mark.parametrize("sequence", [list, tuple])
def test_tensors_in_a_sequence(sequence: type) -> None:
    told: list[SkipReason] = []

    def run(inputs: list[Any]) -> Sequence[Any]:
        (first, second), scale = inputs
        return [first * scale, second]

    callee = Callee(run=run, name="after a loop", device=HOST)
    replayed = Replayed(callee, limits=ReplayLimits(), annotations=None, on_skip=told.append)
    for number in range(4):
        first, second = torch.full((3,), float(number)), torch.ones(2)
        doubled, same = replayed([sequence([first, second]), torch.tensor(2.0)])
        assert doubled.tolist() == [2.0 * number] * 3
        assert same is second
    assert {reason.kind for reason in told} == {SkipKind.SEQUENCE_INPUT}
    assert f"input 0 is a {sequence.__name__} of tensors" in str(told[0])
    assert replayed.fallbacks == {SkipKind.SEQUENCE_INPUT: 4}
