"""Our own work that belongs to a line of the user's: its stack begins there, whatever finds the nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.launch_log import recorded, walked

from graphcap_backend.annotate.config import AnnotationConfig
from graphcap_backend.annotate.stand_in_frame import launch_from
from graphcap_backend.backend import Region

STACKS = AnnotationConfig(record_py_stacks=True, best_effort=True)


@pytest.mark.parametrize("way", [recorded, walked])
def test_a_stack_begins_with_the_line_given(way: Callable[[AnnotationConfig], Any]) -> None:
    x = torch.ones(3)
    with way(STACKS) as run:
        launch_from("/home/me/model.py:321:forward", partial(x.add_, 1))
        launch_from(None, partial(x.mul_, 2))
        x.sin_()
    # (The log of launches has a frame of its own.)
    stacks = [
        [line for line in (run.record.stack(at) or "").splitlines() if "launch_log.py" not in line] for at in range(3)
    ]
    assert stacks[0][0] == "/home/me/model.py:321:forward"
    assert stacks[0][1].startswith(__file__)
    assert x.tolist() == pytest.approx([-0.7568025] * 3)
    assert "/home/me/model.py" not in "".join(stacks[1] + stacks[2])
    # An edge walk sees no lines of eager code, only where it is told.
    assert bool(stacks[2]) == (way is recorded)


def test_a_region_knows_where_it_is_entered() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y + 1

    compiled = torch.compile(doubled, backend="graphcap", options={"host_capture": True})
    x = torch.ones(2, requires_grad=True)
    compiled(x).sum().backward()
    entry = f"{__file__}:{doubled.__code__.co_firstlineno}:doubled"
    (region,) = (region for region in Region.all_live if region.entry == entry)
    entries = [part.replayed.callee.entry() for part in region.parts if part.replayed is not None]
    assert entries == [region.entry] * 2
    torch._dynamo.reset()
