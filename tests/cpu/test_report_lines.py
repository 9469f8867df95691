"""The report names a line of each part, whether it is captured or not, and names it once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcap_backend import report

# Dynamo looks at .grad of what crosses a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class _Broken(nn.Module):
    """Two regions: their backwards are compiled in the opposite order, each after a forward of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        torch._dynamo.graph_break()
        return h.relu()


_FIRST = _Broken.forward.__code__.co_firstlineno + 1


def _trained(model: nn.Module, **options: Any) -> tuple[list[str], dict[str, str]]:
    """The report's lines, and where each part is from, without the file."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="graphcap", options={"on_skip": "ignore", **options})
    for _ in range(3):
        compiled(torch.ones(2, 6)).sum().backward()
    found = report(compiled)
    kinds = [f"{part.name.split()[1]} {part.kind}" for part in found.parts]
    first = min(int(kind.split()[0]) for kind in kinds)
    names = [f"{int(kind.split()[0]) - first} {kind.split()[1]}" for kind in kinds]
    lines = {
        name: (part.where or "none").removeprefix(f"{__file__}:").partition(":")[0]
        for name, part in zip(names, found.parts, strict=True)
    }
    return str(found).splitlines(), lines


@pytest.mark.parametrize("host_capture", [True, False])
def test_a_backward_is_from_its_own_lines(host_capture: bool) -> None:
    _, lines = _trained(_Broken(), host_capture=host_capture)
    assert lines == {
        "0 forward": str(_FIRST),
        "0 backward": str(_FIRST),
        "1 forward": str(_FIRST + 2),
        "1 backward": str(_FIRST + 2),
    }


def test_a_captured_part_has_its_line_below() -> None:
    rows, _ = _trained(_Broken(), host_capture=True)
    assert [row for row in rows if "  at " in row][:2] == [f"  at {__file__}:{_FIRST}:forward"] * 2
    assert rows[0].startswith("region ")
    assert rows[1] == f"  at {__file__}:{_FIRST}:forward"


def test_a_reason_that_names_the_line_is_enough() -> None:
    rows, _ = _trained(_Broken(), host_capture=False)
    assert [row for row in rows if row.startswith("  at ")] == []
    assert f"(at {__file__}:{_FIRST}:forward)" in rows[1]


def test_where_only_torch_s_own_lines_are_known_there_is_none() -> None:
    _trained(_Broken(), host_capture=True)  # whose lines are not to be found here
    rows, lines = _trained(nn.Sequential(nn.Linear(6, 7)), host_capture=True)
    assert lines == {"0 forward": "none", "0 backward": "none"}
    assert [row for row in rows if row.startswith("  at ")] == []
