"""The command line: exit statuses, errors as one line, what each command prints."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.chrome_traces import replay, write_trace
from helpers.saved_captures import model_nodes, profiled, saved

import graphcap_backend
from graphcap_backend import NodeList, load_capture, save_capture
from graphcap_backend.__main__ import main
from graphcap_backend.annotate import cupti, edge_walk
from graphcap_backend.capture.skip import SkipKind, SkipReason
from graphcap_backend.show.saved import SavedPart


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "c.json.gz"
    save_capture(path, profiled(model_nodes(), [3000, 1010, 70], outside=400))
    return str(path)


def test_nodes(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nodes", file]) == 0
    assert capsys.readouterr().out == "graph 0: 3 nodes\n" + model_nodes().render()
    assert main(["nodes", file, "--stacks", "--no-shapes", "--no-line-numbers", "--relative-to", "/m"]) == 0
    expected = model_nodes().render(stacks=True, shapes=False, line_numbers=False, relative_to="/m")
    assert capsys.readouterr().out.endswith(expected)


def test_diff(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", file, file]) == 0
    assert capsys.readouterr().out == "no differences\n"
    changed = NodeList([replace(model_nodes()[0], grid=(9, 1, 1)), *model_nodes()[1:2]])
    other = str(tmp_path / "other.json")
    save_capture(other, saved(changed))
    assert main(["diff", file, other]) == 1
    out = capsys.readouterr().out
    assert "1 removed, 1 changed" in out
    assert "grid: 8x1x1 -> 9x1x1" in out
    assert "\033" not in out
    assert main(["diff", "--no-shapes", file, other]) == 1
    save_capture(other, saved(model_nodes(), model_nodes()))
    assert main(["diff", file, other]) == 1
    assert "+ graph 1: a whole graph of 3 nodes" in capsys.readouterr().out


def test_report_with_times(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", file]) == 0
    out = capsys.readouterr().out
    assert "2.0 us on the GPU a call, over 2 calls" in out
    first = out.splitlines().index("by source line:") + 1
    assert out.splitlines()[first].split() == [
        "85.9%",
        *("14%", "of", "it", "shared"),
        *("2", "nodes"),
        "/m/model.py:10:forward",
    ]
    assert out.splitlines()[first + 1].strip() == "h = self.up(x)"
    assert "mlp" in out
    assert "0.2 us a call outside of the graphs" in out


@pytest.mark.parametrize("timed", [True, False])
def test_report_shows_modules_where_most_has_no_line(
    timed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = NodeList([replace(node, sources=()) for node in model_nodes()])
    path = str(tmp_path / "c.json")
    save_capture(path, profiled(nodes, [300, 101, 7]) if timed else saved(nodes))
    assert main(["report", path]) == 0
    rows = capsys.readouterr().out.partition("by module (most has no source line")[2].splitlines()[1:4]
    expected = [("86.0%", "up"), ("12.3%", "down")] if timed else [("66.7%", "up"), ("33.3%", "(no module)")]
    found = [(row.split()[0], row.split("nodes  ")[1]) for row in rows]
    assert set(expected) <= set(found)


def test_report_without_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = SkipReason(kind=SkipKind.CPU, detail="runs on the CPU", where="m.py:1:f", advice="Try host_capture")
    part = SavedPart(
        name="region 0 forward", kind="forward", partition=0, num_partitions=1, state="skipped", reasons=(reason,),
        where=None, num_keys=0, graphs=(), num_nodes=0, num_bytes=0, num_replays=0, fallbacks={"warm_up": 2}, way=None,
    )  # fmt: skip
    path = str(tmp_path / "c.json")
    save_capture(path, replace(saved(model_nodes()), parts=(part,)))
    assert main(["report", path]) == 0
    out = capsys.readouterr().out
    assert "region 0 forward: skipped" in out
    assert "uncaptured calls: 2 warm_up" in out
    assert "not captured: runs on the CPU (at m.py:1:f). Try host_capture" in out
    assert "  at m.py" not in out  # the reason says it
    assert "3 nodes by source line (no times were saved" in out
    save_capture(path, replace(saved(model_nodes()), parts=(replace(part, where="m.py:2:f"),)))
    assert main(["report", path]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "  at m.py:2:f"
    save_capture(path, saved())
    assert main(["report", path]) == 0
    assert "no captured graph" in capsys.readouterr().out


def test_trace(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = write_trace(tmp_path / "src.json", replay(model_nodes(), 5, 100))
    assert main(["trace", str(src), str(tmp_path / "dst.json"), "--capture", file]) == 0
    assert "3 GPU events of 1 replays labelled (0 by graph node id, 3 by order)" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "dst.json").read_text())["traceEvents"]) > 4


def test_flame(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flame", file]) == 0
    assert (tmp_path / "c.speedscope.json").exists()
    assert "https://www.speedscope.app" in capsys.readouterr().out
    assert main(["flame", file, "--format", "collapsed", "--weight", "nodes"]) == 0
    assert "gemm 1\n" in (tmp_path / "c.folded.txt").read_text()


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for name in ("graphcap", "torch", "GPU", "driver", "cuda-bindings", "libcupti", "cupti-python", "HostGraph"):
        assert f"  {name} " in out


def test_env_without_a_driver_asks_cupti_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(cupti._library.cache_clear)  # what a torch for CUDA 13 finds is not for other tests

    def no_libcuda() -> int:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(edge_walk, "driver_version", no_libcuda)
    monkeypatch.setattr(cupti, "version", lambda: pytest.fail("asked"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "there is no NVIDIA driver; captures go to a HostGraph" in out
    assert "no NVIDIA driver is installed (libcuda.so.1: cannot open" in out
    assert "without an NVIDIA driver CUPTI answers nothing" in out


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (13000, "ok  driver         CUDA 13.0\n"),
        (12040, "no  driver         CUDA 12.4\n{:19}capture on a GPU needs"),
    ],
)
def test_env_tells_a_driver_that_is_too_old(
    version: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(edge_walk, "driver_version", lambda: version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert expected.format("") in out
    assert "torch is built without CUDA; captures go to a HostGraph" in out
    assert "not looked for" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nodes", "none.json"], "graphcap nodes: [Errno 2] No such file or directory"),
        (["report", "empty.json"], "graphcap report: empty.json is cut off or no saved capture"),
        (["flame", "c.json", "--weight", "time"], "graphcap flame: this capture has no times to weigh by"),
        (["trace", "c.json", "dst.json", "--capture", "c.json"], "graphcap trace: c.json is no Chrome trace"),
        (["diff", "c.json", "none.json"], "graphcap diff: [Errno 2]"),
        (["flame", "c.json", "-o", "no/such/x.json"], "graphcap flame: [Errno 2] No such file or directory: 'no/such'"),
        (["flame", "c.json", "-o", "."], "graphcap flame: [Errno 21] Is a directory: '.'"),
        (["flame", "c.json", "-o", "link.json"], "graphcap flame: link.json is the saved capture itself; name another"),
        (["report", "c.json", "--html", "./c.json"], "graphcap report: ./c.json is the saved capture itself"),
        (
            ["trace", "empty.json", "c.json", "--capture", "c.json"],
            "graphcap trace: c.json is the saved capture itself",
        ),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").touch()
    save_capture("c.json", saved(model_nodes()))
    (tmp_path / "link.json").symlink_to("c.json")
    before = (tmp_path / "c.json").read_bytes()
    assert main(arguments) == 2
    assert (tmp_path / "c.json").read_bytes() == before
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    for command in ("demo", "nodes", "diff", "report", "trace", "flame", "env"):
        assert f"\n    {command} " in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"graphcap {graphcap_backend.__version__}\n"


def test_a_trace_without_replays_says_what_to_profile(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "t.json", [])
    assert main(["trace", str(tmp_path / "t.json"), str(tmp_path / "out.json"), "--capture", file]) == 0
    out = capsys.readouterr().out
    assert out.startswith("0 GPU events of 0 replays labelled")
    assert "t.json has no GPU events of graph replays: profile with ProfilerActivity.CUDA" in out


def _on_a_terminal(arguments: list[str], **environment: str) -> str:
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "graphcap_backend", *arguments]
    plain = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    done = subprocess.run(command, stdout=child, env={**plain, **environment}, check=False, timeout=120)
    os.close(child)
    with os.fdopen(parent, "rb", closefd=True) as terminal:
        text = os.read(terminal.fileno(), 1 << 16).decode()
    assert done.returncode == 1
    return text


def test_colour_on_terminals_only(file: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other.json")
    save_capture(other, saved(model_nodes()[:2]))
    assert "\033[31m- 2" in _on_a_terminal(["diff", file, other])
    assert "\033" not in _on_a_terminal(["diff", file, other], NO_COLOR="1")


def test_a_reader_that_goes_away(file: str) -> None:
    command = f"{sys.executable} -m graphcap_backend nodes {file} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""


def test_the_demo_is_saved_with_its_times(tmp_path: Path) -> None:
    path = tmp_path / "demo.json.gz"
    command = [sys.executable, "-m", "graphcap_backend", "demo", "--layers", "1", "--calls", "2", "--save", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    capture = load_capture(path)
    assert capture.profile is not None
    assert "demo.py" in capture.profile.by_line()[0].label
