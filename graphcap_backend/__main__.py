"""Commands: ``python -m graphcap_backend COMMAND`` (installed as ``graphcap`` too).

Exit status: 0 when all is well, 1 when ``diff`` found a difference, 2 when something went wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from graphcap_backend.files import refuse_to_overwrite

_Commands = argparse._SubParsersAction
_RED, _GREEN, _YELLOW, _PLAIN = "\033[31m", "\033[32m", "\033[33m", "\033[0m"
_MARKS = {"+": _GREEN, "-": _RED, "~": _YELLOW}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status of the process."""
    options = _parser().parse_args(argv)
    from graphcap_backend.errors import GraphcapError

    run: Callable[[argparse.Namespace], int] = options.run
    try:
        status = run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (GraphcapError, OSError, ValueError, TypeError) as error:
        print(f"graphcap {options.command}: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphcap",
        description="CUDA graph capture for torch.compile, explained.",
        epilog="A FILE is what save_capture(path, compiled) wrote. `graphcap COMMAND --help` says more.",
    )
    parser.add_argument("--version", action="version", version=f"graphcap {version('graphcap-backend')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    _add_demo(commands)
    _add_nodes(commands)
    _add_diff(commands)
    _add_report(commands)
    _add_trace(commands)
    _add_flame(commands)
    env = commands.add_parser("env", help="what is installed here, what works, and what does not and why")
    env.set_defaults(run=_run_env)
    return parser


def _add_demo(commands: _Commands[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="compile a small transformer, capture it, check it, show its nodes")
    demo.add_argument("--layers", type=_positive, default=2, help="transformer layers (default: %(default)s)")
    demo.add_argument("--calls", type=_two_or_more, default=5, help="calls to make (default: %(default)s)")
    demo.add_argument("--nodes", type=_positive, default=12, help="nodes to print (default: %(default)s)")
    demo.add_argument("--save", metavar="FILE", help="measure replays and save the capture (.json or .json.gz)")
    demo.set_defaults(run=_run_demo)


def _add_nodes(commands: _Commands[argparse.ArgumentParser]) -> None:
    nodes = commands.add_parser("nodes", help="the nodes of a saved capture as text", description=_run_nodes.__doc__)
    nodes.add_argument("file", metavar="FILE", help="saved capture")
    _add_detail(nodes)
    nodes.set_defaults(run=_run_nodes)


def _add_diff(commands: _Commands[argparse.ArgumentParser]) -> None:
    diff = commands.add_parser(
        "diff",
        help="what changed between two saved captures; exit status 1 if anything did",
        description="What has to change in the nodes of A to become those of B, graph by graph. Exit status: 0 equal, "
        "1 different, 2 trouble.",
    )
    diff.add_argument("before", metavar="A", help="saved capture")
    diff.add_argument("after", metavar="B", help="saved capture")
    _add_detail(diff)
    diff.set_defaults(run=_run_diff)


def _add_report(commands: _Commands[argparse.ArgumentParser]) -> None:
    report = commands.add_parser(
        "report",
        help="what was captured, what not and why, and where the time goes",
        description="What was captured, what not and why; time (or nodes) by source line, scope and kernel.",
    )
    report.add_argument("file", metavar="FILE", help="saved capture")
    report.add_argument("--html", metavar="PATH", help="write one self-contained page to PATH instead")
    report.set_defaults(run=_run_report)


def _add_trace(commands: _Commands[argparse.ArgumentParser]) -> None:
    trace = commands.add_parser(
        "trace",
        help="put scopes, source lines and stacks into a trace of torch.profiler",
        description="Copy a Chrome trace that torch.profiler exported, with scope, source line, stack and node index "
        "on the GPU events of graph replays, and lanes of scopes. Open DST in https://ui.perfetto.dev.",
    )
    trace.add_argument("src", metavar="SRC", help="trace (.json or .json.gz); never changed")
    trace.add_argument("dst", metavar="DST", help="the annotated trace, in whole or not at all")
    trace.add_argument("--capture", metavar="FILE", required=True, help="saved capture of what was replayed")
    trace.set_defaults(run=_run_trace)


def _add_flame(commands: _Commands[argparse.ArgumentParser]) -> None:
    flame = commands.add_parser(
        "flame",
        help="a flame graph of a saved capture, for https://www.speedscope.app or flamegraph.pl",
        description="Write a flame graph: call path of the model, source line, kernel.",
    )
    flame.add_argument("file", metavar="FILE", help="saved capture")
    flame.add_argument(
        "--output", "-o", metavar="PATH", help="where to (default: FILE with .speedscope.json or .folded.txt)"
    )
    flame.add_argument("--format", choices=("speedscope", "collapsed"), help="default: by the name of the output")
    flame.add_argument(
        "--weight", choices=("time", "nodes"), help="GPU time or number of nodes (default: time where it was saved)"
    )
    flame.set_defaults(run=_run_flame)


def _add_detail(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stacks", action="store_true", help="the launching call path too")
    parser.add_argument("--modules", action="store_true", help="module paths too")
    parser.add_argument("--no-shapes", dest="shapes", action="store_false", help="no grid, block, shared memory")
    parser.add_argument("--no-sources", dest="sources", action="store_false", help="no source lines")
    parser.add_argument("--no-line-numbers", dest="line_numbers", action="store_false", help="files and functions only")
    parser.add_argument("--relative-to", metavar="DIR", help="show files below DIR relative to it, not by name only")


def _detail(options: argparse.Namespace) -> dict[str, object]:
    names = ("stacks", "modules", "shapes", "sources", "line_numbers", "relative_to")
    return {name: getattr(options, name) for name in names}


def _run_demo(options: argparse.Namespace) -> int:
    from graphcap_backend.demo import run_demo  # imports torch: only when asked for

    run_demo(num_layers=options.layers, num_calls=options.calls, num_nodes=options.nodes, save=options.save)
    return 0


def _run_nodes(options: argparse.Namespace) -> int:
    """Each graph's nodes in the order they were launched, with scopes and source lines."""
    from graphcap_backend.show.commands import nodes_text
    from graphcap_backend.show.saved import load_capture

    for text in nodes_text(load_capture(options.file), _detail(options)):
        print(text, end="")
    return 0


def _run_diff(options: argparse.Namespace) -> int:
    from graphcap_backend.show.commands import diff_text
    from graphcap_backend.show.saved import load_capture

    text = diff_text(load_capture(options.before), load_capture(options.after), _detail(options))
    for line in text.splitlines():
        print(_coloured(line, _MARKS.get(line[:1])))
    if not text:
        print("no differences")
    return 1 if text else 0


def _run_report(options: argparse.Namespace) -> int:
    from graphcap_backend.show.saved import load_capture

    if options.html is not None:
        refuse_to_overwrite(options.file, options.html, "page")
    capture = load_capture(options.file)
    if options.html is not None:
        from graphcap_backend.show.page import write_page

        write_page(capture, options.html)
        print(f"wrote {options.html}")
        return 0
    from graphcap_backend.show.commands import report_text

    for line in report_text(capture):
        print(line)
    return 0


def _run_trace(options: argparse.Namespace) -> int:
    from graphcap_backend.show.tracing import annotate_trace

    refuse_to_overwrite(options.capture, options.dst, "annotated trace")
    found = annotate_trace(options.src, options.dst, capture=options.capture)
    print(found)
    if not found.num_replays:
        print(
            f"{options.src} has no GPU events of graph replays: profile with ProfilerActivity.CUDA, on a GPU, while "
            "the function replays. Replays of a HostGraph leave none"
        )
    return 0


def _run_flame(options: argparse.Namespace) -> int:
    from graphcap_backend.show.flame import write_flame_graph
    from graphcap_backend.show.saved import load_capture

    output = options.output
    if output is None:
        suffix = ".folded.txt" if options.format == "collapsed" else ".speedscope.json"
        output = options.file.removesuffix(".gz").removesuffix(".json") + suffix
    refuse_to_overwrite(options.file, output, "flame graph")
    write_flame_graph(output, load_capture(options.file), weight=options.weight, format=options.format)
    print(f"wrote {output}" + ("" if output.endswith(".txt") else "; open it in https://www.speedscope.app"))
    return 0


def _run_env(options: argparse.Namespace) -> int:
    from graphcap_backend.show.commands import environment

    for finding in environment():
        mark, colour = ("no", _YELLOW) if finding.missing else ("ok", _GREEN)
        print(f"{_coloured(mark, colour)}  {finding.name:14} {finding.found}")
        if finding.missing:
            print(f"{'':19}{finding.missing}")
    return 0


def _coloured(text: str, colour: str | None) -> str:
    if colour is None or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"{colour}{text}{_PLAIN}"


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
