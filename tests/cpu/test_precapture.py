"""Capturing ahead: everything is captured afterwards, it shows, and an interrupt leaves all in order."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphcap_backend import precapture, report


def _compiled(function: Any) -> Any:
    return torch.compile(function, backend="graphcap", options={"host_capture": True}, dynamic=False)


def test_no_call_captures_afterwards(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    def function(x: Tensor, *, scale: float = 2.0) -> Tensor:
        return torch.relu(x * scale) + 1

    compiled = _compiled(function)
    inputs = [torch.randn(2, 3), (torch.randn(4, 3),), {"x": torch.randn(5, 3), "scale": 3.0}]
    with torch.no_grad(), caplog.at_level(logging.INFO, "graphcap_backend"):
        rows = precapture(compiled, inputs, progress=True)
        before = report(compiled)
        assert [row.shape for row in rows] == ["2x3", "4x3", "5x3"]
        assert all(row.num_graphs > 0 and row.seconds > 0 for row in rows)
        assert [row.pool_bytes for row in rows] == sorted({row.pool_bytes for row in rows})
        y = function(inputs[0])
        for _ in range(3):
            y = compiled(inputs[0])  # holds the last result while the next call runs
            torch.testing.assert_close(y, function(inputs[0]))
        after = report(compiled)
    assert len(after.graphs) == len(before.graphs) == sum(row.num_graphs for row in rows)
    err = capsys.readouterr().err
    assert "3/3" in err
    assert "5x3: " in err
    assert " s, pool 0.0 MiB" in err
    assert sum(message.startswith("captured 4x3: ") for message in caplog.messages) == 1
    del y
    with torch.no_grad():
        assert [row.num_graphs for row in precapture(compiled, inputs[:1], progress=False)] == [0]
    assert capsys.readouterr().err == ""


def test_more_shapes_than_are_kept_are_called_once_each_in_turn() -> None:
    def function(x: Tensor) -> Tensor:
        return x * 2 + 1

    compiled = torch.compile(
        function, backend="graphcap", options={"host_capture": True, "max_graphs": 2, "on_skip": "ignore"}, dynamic=True
    )

    with torch.no_grad():
        rows = precapture(compiled, [torch.ones(size) for size in (2, 3, 4)], progress=False)
    (part,) = report(compiled).parts
    assert [row.shape for row in rows] == ["2", "3", "4"]
    assert all(row.num_graphs > 0 for row in rows)
    assert part.num_replays + sum(part.fallbacks.values()) == 12  # until a call captures nothing, and none again


class _Interrupted(list[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield self[0]
        raise KeyboardInterrupt


def test_an_interrupt_leaves_a_working_function() -> None:
    armed = False

    def interrupt(x: Tensor) -> Tensor:
        if armed:
            raise KeyboardInterrupt
        return x.clone()

    operator = torch.library.custom_op(
        "graphcap_test::interrupt", interrupt, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_fake(lambda x: torch.empty_like(x))
    compiled = _compiled(lambda x: operator(x * 2) + 1)
    x = torch.randn(3)
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            precapture(compiled, _Interrupted([torch.randn(2), x]), progress=False)
        compiled(x)  # warm
        armed = True
        with pytest.raises(KeyboardInterrupt):  # inside the capture
            precapture(compiled, [x], progress=False)
        armed = False
        for _ in range(4):
            torch.testing.assert_close(compiled(x), x * 2 + 1)
    assert report(compiled).graphs


def test_wrong_function() -> None:
    with pytest.raises(ValueError, match=r"^precapture\(.*\) takes what torch\.compile"):
        precapture(torch.relu, [torch.ones(1)])


@pytest.mark.parametrize("inputs", [torch.ones(2, 3), 3, {"x": torch.ones(2)}, "x"])
def test_inputs_are_a_list(inputs: Any) -> None:
    called = []
    compiled = _compiled(lambda x: called.append(x))
    with pytest.raises(
        TypeError, match=rf"^inputs must be a list of inputs, .* found {type(inputs).__name__}; .*\[x\]"
    ):
        precapture(compiled, inputs)
    assert not called


class _Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = torch.nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.cells(x)


def test_code_that_dynamo_leaves_alone_is_no_silence() -> None:
    torch._dynamo.reset()
    compiled = _compiled(_Recurrent())
    with pytest.warns(UserWarning, match="precapture captured no graph; (.|\n)*Dynamo compiled none of it"):
        (row,) = precapture(compiled, [torch.ones(2, 3, 4)], progress=False)
    assert row.num_graphs == 0
    with torch._dynamo.config.patch(allow_rnn=True), torch.no_grad():
        torch._dynamo.reset()
        (row,) = precapture(_compiled(_Recurrent()), [torch.ones(2, 3, 4)], progress=False)
    assert row.num_graphs > 0


_TRACED = """
import torch
compiled = torch.compile(lambda x: x.relu() + 1, backend="graphcap", options={"host_capture": True})
with torch.no_grad():
    for _ in range(2):
        compiled(torch.ones(3))
"""


def test_structured_trace(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TRACED],
        env={**os.environ, "TORCH_TRACE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    for name, content in (("nodes", "0 kernel cpp_fused"), ("report", "captured, 1 keys, 1 graphs, 1 nodes")):
        _, _, artifact = text.partition(f'"name": "graphcap_{name}"')
        head, _, payload = artifact.partition("\n")
        assert '"frame_id": 0' in head  # shown below the compile that it belongs to
        assert content in payload[:500]
