"""Commands: ``python -m graphcap_backend COMMAND`` (installed as ``graphcap`` too)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status of the process."""
    options = _parser().parse_args(argv)
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="graphcap", description="CUDA graph capture for torch.compile, explained.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="compile a small transformer, capture it, check it, show its nodes")
    demo.add_argument("--layers", type=_positive, default=2, help="transformer layers (default: %(default)s)")
    demo.add_argument("--calls", type=_two_or_more, default=5, help="calls to make (default: %(default)s)")
    demo.add_argument("--nodes", type=_positive, default=12, help="nodes to print (default: %(default)s)")
    demo.set_defaults(run=_run_demo)


def _run_demo(options: argparse.Namespace) -> int:
    from graphcap_backend.demo import run_demo  # imports torch: only when asked for

    run_demo(num_layers=options.layers, num_calls=options.calls, num_nodes=options.nodes)
    return 0


def _positive(text: str) -> int:
    return _at_least(1, text)


def _two_or_more(text: str) -> int:
    return _at_least(2, text)  # the first call at a shape runs uncaptured, the second is captured


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a number of at least {least}, found {value}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
