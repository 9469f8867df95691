"""What README shows is what one gets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from helpers.package_source import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def _block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return str(text)


def test_example_prints_what_is_printed_there(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(_block("python"), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace(f"{tmp_path}/", "").strip() == _block("text").strip()


def test_readme_is_short() -> None:
    assert len(README.splitlines()) < 100
