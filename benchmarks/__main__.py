"""``python -m benchmarks [ROW ...] [--output FILE]``: measure, print the table, write the results."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import table
from benchmarks.peer_handler import find_peer
from benchmarks.rows import Row
from benchmarks.runner import TOPICS, all_rows, run, run_topic
from benchmarks.settings import Settings

STATUS_NO_CUDA = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 when a row failed to run (a bar that is missed is no failure), 2 without CUDA."""
    arguments = _parser().parse_args(argv)
    settings = Settings(device=arguments.device, quick=arguments.quick, peer=arguments.peer)
    if arguments.append_to is not None:
        run_topic(arguments.rows, settings, arguments.append_to)
        return 0
    unknown = [name for name in arguments.rows if name not in all_rows()]
    if unknown:
        _parser().error(f"no row {', '.join(unknown)}; rows are: {', '.join(all_rows())}")
    if settings.on_cuda and (missing := _missing()):
        print(missing, file=sys.stderr)
        return STATUS_NO_CUDA
    try:
        find_peer(settings.peer)
    except FileNotFoundError as error:
        _parser().error(str(error))
    rows = run(arguments.rows or all_rows(), settings, seconds=arguments.seconds)
    print(table.render(rows))
    print(table.verdict(rows))
    if not settings.on_cuda:
        print("A dry run on the CPU: its numbers and verdicts mean nothing.")
    if arguments.output is not None:
        _write(arguments.output, rows, settings, shown_command(argv or sys.argv[1:]))
    return int(any(row.status == "failed" for row in rows))


def shown_command(arguments: Sequence[str]) -> str:
    """The command to run for such figures, with file names that mean something elsewhere too."""
    shown = [argument if argument.startswith("-") else Path(argument).name for argument in arguments]
    return shlex.join(["python", "-m", "benchmarks", *shown])


def _missing() -> str | None:
    """What a measurement needs and is not here."""
    import torch

    if torch.cuda.is_available():
        return None
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return (
        "python -m benchmarks measures an NVIDIA GPU and found none: "
        f"torch {torch.__version__}, {build}, says torch.cuda.is_available() is False. "
        "Run it on a machine with a GPU, an NVIDIA driver, and torch for CUDA"
    )


def _write(path: Path, rows: Sequence[Row], settings: Settings, command: str) -> None:
    from benchmarks.versions import versions

    results = {
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": settings.device,
        "quick": settings.quick,
        "rows": [row.to_json() for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


def _parser() -> argparse.ArgumentParser:
    topics = "; ".join(f"{topic}: {', '.join(rows)}" for topic, rows in TOPICS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure graphcap beside reduce-overhead, plain torch.compile and raw replays on an NVIDIA GPU.",
        epilog=f"Rows by topic: {topics}.",
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="measure only these (default: all)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results there as JSON")
    parser.add_argument("--quick", action="store_true", help="a few rounds only, to see that all works")
    parser.add_argument("--peer", metavar="FILE", help="torch 2.15's torch/cuda/_graph_node_callbacks.py")
    parser.add_argument("--seconds", type=float, default=420, help="rows not begun by then fail (default: %(default)s)")
    # Dry run without a GPU, and what the processes that the command starts are told.
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--append-to", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
