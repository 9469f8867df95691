"""Make anew what the documentation shows: outputs of commands, and pictures of the page.

    python docs/make_outputs.py

Below a line ``<!-- output of: COMMAND -->`` the fenced block becomes what the command prints. Commands run in a
scratch folder with a copy of ``examples``, all in one, in the order of ``PAGES``: a later one may read a file that an
earlier one wrote. A block below ``<!-- file: NAME -->`` is there as a file. Pictures need Debian's chromium; without
it they stay as they are.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGES = (
    "getting-started.md",
    "manual-capture.md",
    "reading-stacks.md",
    "snapshot-tests.md",
    "profiling-by-line.md",
    "when-it-does-not-capture.md",
    "faq.md",
    "how-it-works.md",
)
_BLOCK = re.compile(r"^<!-- output of: (?P<command>[^\n]+) -->\n```text\n.*?^```$", re.MULTILINE | re.DOTALL)

_SCRIPT = re.compile(r"^<!-- file: (?P<name>\S+) -->\n```python\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        shutil.copytree(ROOT / "examples", folder / "examples")
        for page in PAGES:
            path = DOCS / page
            text = path.read_text(encoding="utf-8")
            for script in _SCRIPT.finditer(text):
                (folder / script["name"]).write_text(script["text"], encoding="utf-8")
            path.write_text(_BLOCK.sub(lambda block: _filled(block, folder), text), encoding="utf-8")
            print(page)
        _pictures(folder)


def _filled(block: re.Match[str], folder: Path) -> str:
    command = block["command"]
    return f"<!-- output of: {command} -->\n```text\n{_output(command, folder).rstrip()}\n```"


def _output(command: str, folder: Path) -> str:
    """What ``command`` prints; a status other than 0 is told, as a shell's prompt would."""
    program, *arguments = shlex.split(command)
    assert program == "python", f"{command}: commands of the documentation begin with python"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    text = done.stdout + (done.stderr if done.returncode == 2 else "")
    if done.returncode:
        text += f"[exit status {done.returncode}]\n"
    for prefix in (folder, ROOT):
        text = text.replace(f"{prefix}/", "")
    return text


def _pictures(folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.browser import Browser, missing_browser

    if missing := missing_browser():
        print(f"pictures left as they are: {missing}")
        return
    _output("python examples/08_page.py page.html", folder)
    page = folder / "page.html"
    page.write_text(page.read_text(encoding="utf-8").replace(f"{folder}/", ""), encoding="utf-8")
    with Browser() as browser:
        for name, width, height, dark in (
            ("wide", 1600, 1200, False),
            ("dark", 1600, 1200, True),
            ("narrow", 400, 1100, False),
        ):
            browser.look(width=width, height=height, dark=dark)
            browser.open(page)
            browser.evaluate("document.querySelector('#shares button.share').click()")
            browser.evaluate("document.querySelector('#rows .row:nth-child(2)').click()")
            browser.evaluate("scrollTo(0, 0)")
            if dark:
                browser.evaluate("document.getElementById('nodes').scrollIntoView()")
            browser.picture(DOCS / "images" / f"page-{name}.png")
            print(f"images/page-{name}.png")
        assert not browser.problems, browser.problems


if __name__ == "__main__":
    main()
