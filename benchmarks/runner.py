"""Runs topics, each in a process of its own, and survives rows that fail and processes that die."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.rows import Row
from benchmarks.settings import Settings

# Module and the names that select its rows. In this order: what has no bar comes last.
TOPICS = {
    "calls": ("one-kernel", "mlp4", "transformer4", "transformer12"),
    "training": ("training",),
    "memory": ("memory",),
    "left_behind": ("left-behind",),
    "recording": ("recording", "nesting"),
    "nodes": ("nodes",),
    "breakdown": ("breakdown",),
    "liveness": ("liveness",),
}


def all_rows() -> list[str]:
    """Every name that may be asked for."""
    return [name for names in TOPICS.values() for name in names]


def run(names: Sequence[str], settings: Settings, *, seconds: float) -> list[Row]:
    """Measure the rows named, topic by topic. What does not come back is a failed row."""
    end = time.monotonic() + seconds
    rows: list[Row] = []
    for known in TOPICS.values():
        chosen = [name for name in known if name in names]
        if chosen:
            rows.extend(_run_in_process(chosen, settings, end - time.monotonic()))
    return rows


def _run_in_process(names: Sequence[str], settings: Settings, seconds: float) -> list[Row]:
    if seconds <= 0:
        return [_failed(name, "the time of the whole run was used up before") for name in names]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "rows")
        results.touch()
        began = time.monotonic()
        print(f"measuring {', '.join(names)} ...", file=sys.stderr, flush=True)
        status = _wait(_command(names, settings, results), seconds)
        print(f"  {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    rows = [Row.from_json(row) for line in lines for row in line["rows"]]
    done = {line["name"] for line in lines}
    return rows + [_failed(name, f"its process ended early: {status}") for name in names if name not in done]


def _wait(command: Sequence[str], seconds: float) -> str:
    """Run a command to its end, and take it away with all that it started after ``seconds``."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return f"status {process.wait(timeout=seconds)}"
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return f"killed after {seconds:.0f} s, when the time of the whole run was used up"
        raise


def _command(names: Sequence[str], settings: Settings, results: Path) -> list[str]:
    command = [sys.executable, "-m", "benchmarks", *names, "--device", settings.device, "--append-to", str(results)]
    command += ["--quick"] if settings.quick else []
    return command + (["--peer", settings.peer] if settings.peer else [])


def run_topic(names: Sequence[str], settings: Settings, results: Path) -> None:
    """Measure rows of one topic here; append each name's rows to ``results`` as a line of JSON once they are there."""
    import torch

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    for topic, known in TOPICS.items():
        for name in known:
            if name in names:
                rows = measure_row(topic, name, settings)
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"name": name, "rows": [row.to_json() for row in rows]}) + "\n")


def measure_row(topic: str, name: str, settings: Settings) -> list[Row]:
    """The rows of one name, or one failed row that says why."""
    try:
        functions: dict[str, Callable[[Settings], list[Row]]] = importlib.import_module(f"benchmarks.{topic}").ROWS
        return functions[name](settings)
    except Exception as error:  # noqa: BLE001 - one row that fails must not take the others along
        traceback.print_exc()
        return [_failed(name, f"{type(error).__name__}: {error}")]


def _failed(name: str, why: str) -> Row:
    return Row(name=name, what="not measured", status="failed", note=why)
