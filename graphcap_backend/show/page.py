"""One self-contained HTML page: what was captured, what was not and why, and where the time goes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from graphcap_backend.files import written_whole
from graphcap_backend.show.page_data import page_data
from graphcap_backend.show.profile import Profile
from graphcap_backend.show.saved import SavedCapture, snapshot

_SCRIPTS = ("labels.js", "shares.js", "table.js", "details.js", "drawing.js", "page.js")


def write_page(source: Any, path: str | os.PathLike[str], profile: Profile | None = None) -> None:
    """Write one HTML page on captured graphs, to open from disk: it loads nothing from anywhere.

    It shows what was captured, skipped or fell back and why; time by source line, scope, module and kernel
    (or numbers of nodes, where nothing was timed) with the source beside; all nodes, to be searched; and the
    graph drawn.

    Args:
        source: a compiled function, a captured graph, its :class:`Report`, a profile, or a saved capture.
        path: the file; there in whole or not at all.
        profile: times to show, if ``source`` has none of its own; they are of the same capture.

    Raises:
        ValueError, GraphcapError: ``source`` is none of these.
        OSError: the file can't be written.
    """
    if profile is not None and not isinstance(profile, Profile):
        raise ValueError(f"profile must be what profile_replays() gave, found {type(profile).__name__}")
    html = page_html(snapshot(source if profile is None else profile, "write_page(source, path)"))
    with written_whole(path) as file:
        file.write(html)


def page_html(capture: SavedCapture) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup

    loader = jinja2.PackageLoader("graphcap_backend.show")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True,
                                     undefined=jinja2.StrictUndefined)  # fmt: skip

    def verbatim(name: str) -> Markup:
        return Markup(loader.get_source(environment, name)[0])

    html = environment.get_template("page.html").render(
        capture=capture,
        summary=list(summary(capture)),
        style=verbatim("page.css"),
        script=Markup("\n").join(map(verbatim, _SCRIPTS)),
        data=Markup(_json_in_html(page_data(capture))),
    )
    # Names of files need not be UTF-8. What can't be written becomes an escape, which is one in JSON too.
    return html.encode("utf-8", "backslashreplace").decode()


def summary(capture: SavedCapture) -> Iterator[str]:
    """The page's first sentences."""
    graphs = _counted(len(capture.graphs), "graph")
    nodes = _counted(capture.num_nodes, "node")
    if capture.parts:
        captured = sum(part.state == "captured" for part in capture.parts)
        yield f"Captured: {captured} of {_counted(len(capture.parts), 'compiled part')}, in {graphs} with {nodes}."
    else:
        yield f"{graphs} with {nodes}." if capture.graphs else "No captured graph."
    profile = capture.profile
    if profile is None:
        yield "Nothing was timed, so shares below are numbers of nodes; profile_replays() measures times."
        return
    where = "of GPU time" if profile.clock == "cuda" else "of launches on the CPU"
    yield f"{_time(profile.nodes_ns / profile.num_calls)} {where} a call, over {_counted(profile.num_calls, 'call')}."
    if profile.outside:
        outside = (profile.total_ns - profile.nodes_ns) / profile.num_calls
        yield f"{_time(outside)} a call outside of the graphs: input copies, code that is not captured."


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _time(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            number = nanoseconds / size
            return f"{number:.3g} {unit}" if number < 100 else f"{number:.0f} {unit}"
    return f"{nanoseconds:.0f} ns"


def _json_in_html(data: Any) -> str:
    """JSON that ends no script element and opens no comment, whatever names are in it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
