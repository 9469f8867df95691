"""The command line: the demo as README runs it, and wrong arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from graphcap_backend.__main__ import main


def test_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "graphcap_backend", "demo", "--layers", "1", "--calls", "3", "--nodes", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal to eager") == 3
    assert "First 4 of" in done.stdout
    assert "self.attention(self.norm1(x))" in done.stdout or "self.norm1(x)" in done.stdout  # the first kernel's line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["dance"], "invalid choice: 'dance' (choose from"),
        (["demo", "--calls", "1"], "expected a number of at least 2, found 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
