"""The page: what is in it, that names can't break it, and that it works in a browser by mouse and by keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.browser import Browser, missing_browser
from helpers.node_lists import kernel
from helpers.pages import EVIL, many_nodes, ten_node_capture, two_graphs
from helpers.saved_captures import model_nodes, profiled, saved

from graphcap_backend import (
    HostGraph,
    NodeList,
    SavedCapture,
    graph,
    load_capture,
    mark_kernels,
    profile_replays,
    report,
    save_capture,
    write_page,
)
from graphcap_backend.__main__ import main
from graphcap_backend.show.page import page_html
from graphcap_backend.show.page_data import page_data


class _Reader(HTMLParser):
    """Elements, text, and whatever would load something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.text = ""
        self.links: list[str] = []
        self._in: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._in.append(tag)
        if tag == "script":
            self.scripts.append("")
        self.links += [str(value) for name, value in attributes if name in ("src", "href", "action", "data")]

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, text: str) -> None:
        if self._in and self._in[-1] == "script":
            self.scripts[-1] += text
        elif self._in and self._in[-1] != "style":
            self.text += text


def _data(html: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_Reader(html).scripts[0])
    return found


def test_report_is_told_in_words() -> None:
    text = " ".join(_Reader(page_html(ten_node_capture())).text.split())
    assert "Captured: 1 of 2 compiled parts, in 1 graph with 10 nodes." in text
    assert "7.42 µs of GPU time a call, over 2 calls." in text
    assert "617 ns a call outside of the graphs" in text
    assert "Uncaptured calls: 1 warm up" in text
    assert "Not captured (inductor): skipping cudagraphs due to <cpu> & device /m/model.py:12:forward" in text


def test_no_name_ends_a_script_or_becomes_markup() -> None:
    html = page_html(ten_node_capture())
    read = _Reader(html)
    assert len(read.scripts) == 2
    assert f"region 1 {EVIL}" in read.text
    assert EVIL in [name["full"] for name in _data(html)["names"]]
    assert "<b>" not in html


def test_name_that_is_no_utf_8_is_written(tmp_path: Path) -> None:
    odd = "/m/\udcff.py:1:f"
    part = replace(ten_node_capture().parts[0], where=odd)
    capture = replace(saved(NodeList([kernel(0, sources=(odd,))])), parts=(part,))
    write_page(capture, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert _data(html)["files"][0]["path"] == "/m/\udcff.py"
    assert r"/m/\udcff.py:1:f" in _Reader(html).text


def test_loads_nothing() -> None:
    html = page_html(ten_node_capture())
    assert _Reader(html).links == ["data:,", "#lines"]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import ", html)


def test_data_holds_every_node_and_time() -> None:
    data = page_data(ten_node_capture())
    assert [node["at"] for node in data["nodes"]] == ["0", "1", "2", "3", "4", "5", "6", "6.0", "6.1", "7", "8", "9"]
    assert sum(node["timing"][1] for node in data["nodes"] if "timing" in node) == 14841
    copy, gemm, fused = data["nodes"][:3]
    assert copy["facts"] == {"copies": "4,096 bytes, host to device"}
    assert gemm["scopes"] == ["mlp"]
    lines = [data["frames"][frame] for frame in fused["sources"]]
    places = [(data["files"][line["file"]]["path"], line["line"]) for line in lines]
    assert places == [("/m/model.py", 10), ("/m/model.py", 11)]
    assert data["files"][0]["lines"] == {10: "h = self.up(x)", 11: "return self.down(gelu(h)) + x"}


def test_texts_are_in_it_once() -> None:
    data = page_data(many_nodes(1000))
    assert len(data["nodes"]) == 1000
    assert len(data["names"]) == 4
    assert len(data["frames"]) == 200


def test_graph_captured_by_hand(tmp_path: Path) -> None:
    g = HostGraph()
    with graph(g, enable_annotations=True), mark_kernels("double"):
        _ = torch.ones(3) * 2
    write_page(g, tmp_path / "page.html")
    data = _data((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "aten.mul.Tensor" in [name["short"] for name in data["names"]]
    assert data["nodes"][-1]["scopes"] == ["double"]
    assert data["clock"] is None


def test_compiled_function_its_report_and_its_file_give_the_same_page(tmp_path: Path) -> None:
    compiled = torch.compile(lambda x: torch.relu(x * 3), backend="graphcap", options={"host_capture": True})
    profile = profile_replays(compiled, torch.ones(5))
    report(compiled).to_html(tmp_path / "report.html", profile)
    write_page(compiled, tmp_path / "page.html", profile)
    save_capture(tmp_path / "capture.json", profile)
    assert main(["report", str(tmp_path / "capture.json"), "--html", str(tmp_path / "command.html")]) == 0
    pages = [(tmp_path / f"{name}.html").read_text(encoding="utf-8") for name in ("report", "page", "command")]
    assert pages[0] == pages[1] == pages[2]
    assert "of launches on the CPU a call, over 20 calls" in pages[0]
    data = _data(pages[0])
    assert any("test_page.py" in file["path"] for file in data["files"])
    assert any("torch.relu(x * 3)" in text for file in data["files"] for text in file["lines"].values())
    report(compiled).to_html(tmp_path / "untimed.html")
    assert _data((tmp_path / "untimed.html").read_text(encoding="utf-8"))["clock"] is None


def test_wrong_profile_and_unwritable_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="profile_replays"):
        write_page(ten_node_capture(), tmp_path / "page.html", profile=load_capture)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        write_page(ten_node_capture(), tmp_path / "nowhere" / "page.html")
    assert not list(tmp_path.iterdir())


# In a browser. One for all of these tests: each opens its own page.


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    if missing := missing_browser():
        pytest.skip(missing)
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(started: Browser) -> Iterator[Browser]:
    started.problems.clear()
    started.look(width=1600)
    yield started
    assert started.problems == []


def _opened(browser: Browser, capture: SavedCapture, tmp_path: Path) -> float:
    path = tmp_path / "page.html"
    write_page(capture, path)
    return browser.open(path)


def _texts(browser: Browser, selector: str) -> list[str]:
    script = f"[...document.querySelectorAll({json.dumps(selector)})].map(each => each.textContent)"
    return [str(text) for text in browser.evaluate(script)]


def _click(browser: Browser, selector: str) -> None:
    browser.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


def _shares(browser: Browser, view: str) -> dict[str, str]:
    _click(browser, f"#tab-{view}")
    return dict(zip(_texts(browser, "#shares .label"), _texts(browser, "#shares .value"), strict=True))


def test_shares_are_those_of_the_profile(browser: Browser, tmp_path: Path) -> None:
    capture = ten_node_capture()
    _opened(browser, capture, tmp_path)
    assert capture.profile is not None
    by_line = [share.weight / 2 for share in capture.profile.by_line()]
    assert by_line[:3] == [5250.5, 1650, 485]
    assert list(_shares(browser, "lines").values()) == ["5.25 µs", "1.65 µs", "485 ns", "35 ns"]
    assert _shares(browser, "scopes") == {"(no scope)": "2.89 µs", "mlp": "4.50 µs", EVIL: "35 ns"}
    assert _shares(browser, "modules")["up"] == "750 ns"
    assert _shares(browser, "kernels")["gemm"] == "4.50 µs"
    assert "Outside of the graphs: 617 ns a call" in _texts(browser, "#shares h3")
    assert browser.evaluate("window.broken === undefined")


def test_source_is_shown_beside_bars(browser: Browser, tmp_path: Path) -> None:
    _opened(browser, ten_node_capture(), tmp_path)
    _click(browser, "#shares button.share")
    assert _texts(browser, "#shares .context .named code") == ["h = self.up(x)"]
    assert _texts(browser, "#shares .context .named .value") == ["5.25 µs"]
    _click(browser, "#tab-source")
    assert "return self.down(gelu(h)) + x" in _texts(browser, "#shares .excerpt code")
    _click(browser, "#tab-lines")
    _click(browser, "#shares button.share")
    _click(browser, ".show-nodes")
    assert _texts(browser, "#rows .cell.at") == ["1", "2"]
    _click(browser, "#label-filter button")
    assert len(_texts(browser, "#rows .row")) == 12


def test_counts_where_nothing_was_timed(browser: Browser, tmp_path: Path) -> None:
    _opened(browser, two_graphs(), tmp_path)
    assert _texts(browser, "#shares-note")[0].startswith("60 nodes.")
    browser.evaluate("graph.value = '0'; graph.dispatchEvent(new Event('change'))")
    assert _shares(browser, "lines")["m/model.py:11"] == "4"  # three of its own, and the fused one
    assert _texts(browser, "#found") == ["12 of 62 nodes"]
    assert len(_texts(browser, "#drawing .box")) == 10


def test_search_sort_and_details(browser: Browser, tmp_path: Path) -> None:
    _opened(browser, ten_node_capture(), tmp_path)
    browser.evaluate("document.activeElement.blur()")
    browser.press("/")
    browser.type("GELU model.py:10")
    assert _texts(browser, "#rows .cell.kernel") == ["triton_poi_fused_add_gelu"]
    browser.evaluate("query.value = ''; query.dispatchEvent(new Event('input'))")
    _click(browser, "#grid-head .time button")
    assert _texts(browser, "#rows .cell.time")[:3] == ["4.50 µs", "1.50 µs", "400 ns"]
    _click(browser, "#rows .row:nth-child(2)")
    details = _texts(browser, "#details")[0]
    for part in ("up, down", "triton_poi_fused_add_gelu_0", "2, mean 1.50 µs, 1.00 µs to 2.00 µs", "8 x 1 x 1"):
        assert part in details
    assert _texts(browser, "#details .jump") == ["1", "3", "4"]
    _click(browser, "#details .jump")
    assert _texts(browser, "#details h3") == ["1 gemm"]
    assert _texts(browser, "#drawing .selected .name") == ["1 gemm"]


def test_by_keyboard_alone(browser: Browser, tmp_path: Path) -> None:
    _opened(browser, ten_node_capture(), tmp_path)
    browser.evaluate("document.querySelector('#tab-lines').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert browser.evaluate("document.activeElement.id") == "tab-scopes"
    assert "mlp" in _texts(browser, "#shares .label")
    browser.evaluate("grid.focus()")
    for key in ("ArrowDown", "ArrowDown", "End", "ArrowUp"):
        browser.press(key)
    assert _texts(browser, "#rows [aria-selected=true] .cell.at") == ["8"]
    assert (
        browser.evaluate("document.getElementById(grid.getAttribute('aria-activedescendant')).ariaSelected") == "true"
    )
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.id") == "details"
    browser.evaluate("drawing.focus()")
    browser.press("ArrowUp")
    assert _texts(browser, "#drawing .selected .name")[0].startswith("7 ")
    reached = set()
    browser.evaluate("document.body.tabIndex = -1, document.body.focus()")
    for _ in range(45):
        browser.press("Tab")
        reached.add(browser.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"skip", "theme", "measure", "tab-scopes", "share", "query", "kind", "grid", "drawing"} <= reached


def test_ten_thousand_nodes(browser: Browser, tmp_path: Path) -> None:
    assert _opened(browser, many_nodes(10_000), tmp_path) < 3
    assert len(_texts(browser, "#rows .row")) < 60
    assert len(_texts(browser, "#drawing .box")) == 300
    _click(browser, "#later")
    assert _texts(browser, "#drawing-note") == ["nodes 300 to 599 of 10,000"]
    browser.evaluate("grid.focus()")
    browser.press("End")
    assert _texts(browser, "#rows [aria-selected=true] .cell.at") == ["9999"]
    assert _texts(browser, "#drawing-note") == ["nodes 9,700 to 9,999 of 10,000"]
    took = browser.evaluate("""(() => {
        const start = performance.now();
        query.value = "layer.249 gelu"; query.dispatchEvent(new Event("input"));
        grid.scrollTop = 1e6;
        return performance.now() - start;
    })()""")
    assert took < 1000
    assert _texts(browser, "#found") == ["10 of 10,000 nodes"]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1600])
def test_fits_and_can_be_read(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    browser.look(width=width, dark=dark)
    _opened(browser, ten_node_capture(), tmp_path)
    _click(browser, "#shares button.share")
    _click(browser, "#rows .row:nth-child(2)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert _contrast(browser, "body", "body") > 7
    assert _contrast(browser, ".note", "body") > 4.5
    assert _contrast(browser, "#rows [aria-selected=true] .cell", "#rows [aria-selected=true]") > 4.5
    _click(browser, "#theme")
    assert _contrast(browser, "body", "body") > 7


def _contrast(browser: Browser, text: str, back: str) -> float:
    script = f"""[getComputedStyle(document.querySelector({json.dumps(text)})).color,
                  getComputedStyle(document.querySelector({json.dumps(back)})).backgroundColor]"""
    bright, dark = sorted((_luminance(colour) for colour in browser.evaluate(script)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_nothing_captured(browser: Browser, tmp_path: Path) -> None:
    capture = ten_node_capture()
    _opened(browser, SavedCapture(versions=capture.versions, graphs=(), parts=capture.parts[1:]), tmp_path)
    assert browser.evaluate("document.getElementById('nodes').hidden")
    assert "Captured: 0 of 1 compiled part, in 0 graphs with 0 nodes." in _texts(browser, ".summary")[0]


def test_profile_given_beside_its_capture(tmp_path: Path) -> None:
    profile = profiled(model_nodes(), [900, 300, 21])
    write_page(profile.capture, tmp_path / "page.html", profile)
    assert _data((tmp_path / "page.html").read_text(encoding="utf-8"))["clock"] == "cuda"
