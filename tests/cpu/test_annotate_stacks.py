"""Stacks: whose frames are in them, and from where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launch_log import leaf, recorded

import graphcap_backend
from graphcap_backend.annotate.config import AnnotationConfig
from graphcap_backend.annotate.origins import KernelOrigin, WrapperOrigins
from graphcap_backend.annotate.scopes import FORWARD_ONLY
from graphcap_backend.annotate.stacks import Provenance, StackFilter, describe
from graphcap_backend.fx_traces import SCOPE_FRAME

ROOT = str(Path(graphcap_backend.__file__).parent)
NOTHING = Provenance(wrappers={}, line_maps={})
DEFAULT = StackFilter(None, NOTHING)


def launch_here() -> None:
    torch.zeros(1)


def stacks_of(config: dict[str, Any], program: Any = launch_here) -> list[str]:
    with recorded(AnnotationConfig.parse({"record_py_stacks": True, **config})) as run:
        program()
    lines = (run.record.stack(0) or "").splitlines()
    return [line for line in lines if "launch_log" not in line]


def test_innermost_first_as_file_line_function() -> None:
    first, second = stacks_of({})[:2]
    line = launch_here.__code__.co_firstlineno + 1
    assert first == f"{__file__}:{line}:launch_here"
    assert second.startswith(f"{__file__}:")
    assert second.endswith(":stacks_of")


def test_without_record_py_stacks_there_are_none() -> None:
    with recorded(AnnotationConfig()) as run:
        launch_here()
    assert run.record.stack(0) is None
    assert run.record.sources(0) == ()


def test_frames_of_torch_and_of_graphcap_are_left_out_by_default() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    lines = stacks_of({}, lambda: module(torch.ones(1, 2)))
    assert not [line for line in lines if line.startswith((os.path.dirname(torch.__file__), ROOT))]  # noqa: PTH120


def test_an_empty_list_filters_nothing() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    lines = stacks_of({"py_stack_filter_paths": []}, lambda: module(leaf(1, 2)))
    assert any(line.endswith(":<lambda>") for line in lines)
    assert lines[0].startswith(str(Path(torch.__file__).parent)) or lines[0].endswith(":leaf")


def test_a_list_replaces_the_default() -> None:
    here = str(Path(__file__).parent)
    assert not [line for line in stacks_of({"py_stack_filter_paths": [here]}) if line.startswith(here)]


def test_directories_match_on_their_boundaries() -> None:
    sibling = StackFilter(["/work/mod"], NOTHING)
    assert sibling.omits("/work/mod/a.py")
    assert not sibling.omits("/work/model/a.py")
    assert not sibling.omits("/work/mod.py")
    assert StackFilter(["/work/mod/"], NOTHING).omits("/work/mod/a.py")
    assert not sibling.omits("<string>")
    assert StackFilter(["/"], NOTHING).omits("/work/a.py")


def test_relative_paths_are_resolved_when_the_capture_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)

    def program() -> None:
        monkeypatch.chdir(tmp_path)
        launch_here()

    here = str(Path(__file__).parent)
    assert not [line for line in stacks_of({"py_stack_filter_paths": ["cpu"]}, program) if line.startswith(here)]


def test_code_made_by_exec_has_its_own_lines() -> None:
    made: dict[str, Any] = {"torch": torch}
    exec(compile("def f():\n\n    torch.zeros(1)\n", "<my generated code>", "exec"), made)
    assert stacks_of({}, made["f"])[0] == "<my generated code>:3:f"


def test_code_of_a_deleted_file_has_too(tmp_path: Path) -> None:
    path = tmp_path / "gone.py"
    path.write_text("import torch\ndef f():\n    torch.zeros(1)\n")
    made: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), made)
    path.unlink()
    assert stacks_of({}, made["f"])[0] == f"{path}:3:f"


def test_one_function_called_from_two_places_has_two_stacks() -> None:
    with recorded() as run:
        launch_here()
        launch_here()
    first, second = run.record.stack(0), run.record.stack(1)
    assert first is not None
    assert second is not None
    assert first.splitlines()[1] == second.splitlines()[1]  # the helper's, then launch_here's
    assert first != second


def test_python_c(tmp_path: Path) -> None:
    program = """
import torch
from graphcap_backend import HostGraph, capture_nodes, graph
g = HostGraph()
x = torch.ones(2)
with graph(g, enable_annotations=True, annotation_config={"record_py_stacks": True}):
    x.add_(1)
print(capture_nodes(g)[0].stack)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "<string>:7:<module>"


# Stacks through a generated module, from frames.

WRAPPER = "/cache/torchinductor/ab/wrapper.py"
USER = ("/app/train.py", 9, "main")
TORCH = (str(Path(torch.__file__).parent / "nn/modules/linear.py"), 134, "forward")
LAYER = ("/app/model.py", 5, "block")
LOOP = ("/app/model.py", 20, "forward")


def through(origin: KernelOrigin | None, line_map: Any = (), filter_paths: list[str] | None = None) -> Any:
    provenance = Provenance(
        wrappers={} if origin is None else {WRAPPER: WrapperOrigins(WRAPPER, {7: origin})},
        line_maps={WRAPPER: line_map},
    )
    frames = [
        ("<string>", 4, "launcher"),
        (str(Path(torch.__file__).parent / "_inductor/runtime/triton_heuristics.py"), 1, "run"),
        (WRAPPER, 7, "call"),
        TORCH,
        ("/app/model.py", 18, "forward"),
        USER,
    ]
    default = StackFilter(None, provenance)
    chosen = default if filter_paths is None else StackFilter(filter_paths, provenance)
    return describe(frames, provenance, chosen, default)


def test_a_compiled_kernel_names_the_model_s_line_then_who_called_the_region() -> None:
    launch = through(KernelOrigin(chains=((TORCH, LAYER, LOOP),), modules=("l1",)))
    assert launch.stack == "/app/model.py:5:block\n/app/model.py:20:forward\n/app/train.py:9:main"
    assert launch.sources == ("/app/model.py:5:block",)
    assert launch.modules == ("l1",)


def test_all_fused_lines_are_sources_and_come_first() -> None:
    other = ("/app/model.py", 6, "block")
    launch = through(KernelOrigin(chains=((LAYER, LOOP), (other, LOOP), (TORCH, LAYER, LOOP))))
    assert launch.sources == ("/app/model.py:5:block", "/app/model.py:6:block")
    assert (launch.stack or "").splitlines()[:3] == [
        "/app/model.py:5:block",
        "/app/model.py:6:block",
        "/app/model.py:20:forward",
    ]


def test_without_origins_inductor_s_line_map_stands_in() -> None:
    text = '  File "/app/model.py", line 20, in forward\n    x\n  File "/app/model.py", line 5, in block\n    y\n'
    launch = through(None, line_map=[(1, 6, 8), (None, text, None)])
    assert launch.stack == "/app/model.py:5:block\n/app/model.py:20:forward\n/app/train.py:9:main"
    assert launch.sources == ("/app/model.py:5:block",)


def pseudo_frame(carried: dict[str, Any]) -> str:
    return f"{SCOPE_FRAME}{json.dumps(carried).encode().hex()}>"


def test_module_and_scope_ride_through_the_line_map_in_no_frame() -> None:
    file = pseudo_frame({"module": "0.norm", "scope": {"name": "s"}})
    text = f'  File "{file}", line 1, in scope\n    pass\n  File "/app/model.py", line 5, in block\n    y\n'
    launch = through(None, line_map=[(1,), (text,)])
    assert launch.stack == "/app/model.py:5:block\n/app/model.py:18:forward\n/app/train.py:9:main"
    assert (launch.sources, launch.modules) == (("/app/model.py:5:block",), ("0.norm",))
    assert launch.annotation == launch.backward_annotation == {"name": "s"}


def test_a_module_of_torch_s_own_has_no_line_of_the_model_s() -> None:
    file = pseudo_frame({"module": "1", "scope": {"name": "s", FORWARD_ONLY: True}})
    text = f'  File "{file}", line 1, in scope\n    pass\n'
    launch = through(None, line_map=[(1,), (text,)])
    assert launch.stack == "/app/model.py:18:forward\n/app/train.py:9:main"
    assert (launch.sources, launch.modules, launch.is_compiled) == ((), ("1",), True)
    assert (launch.annotation, launch.backward_annotation) == ({"name": "s"}, None)


def test_what_rides_through_the_line_map_is_no_line_also_where_the_symbolizer_put_it_and_nothing_is_filtered() -> None:
    file = pseudo_frame({"module": "1"})
    text = f'  File "{file}", line 1, in scope\n    pass\n  File "/app/model.py", line 20, in forward\n    y\n'
    provenance = Provenance(wrappers={}, line_maps={WRAPPER: [(1,), (text,)]})
    frames = [(WRAPPER, 7, "call"), LOOP, (file, 1, "scope"), ("/app/model.py", 18, "forward"), USER]
    launch = describe(frames, provenance, StackFilter([], provenance), StackFilter(None, provenance))
    # The rewritten function's frame is left out: the line map has its line.
    assert launch.stack == f"{WRAPPER}:7:call\n/app/model.py:20:forward\n/app/train.py:9:main"


def test_origins_outrank_the_line_map() -> None:
    wrong = '  File "/app/model.py", line 99, in forward\n    x\n'
    launch = through(KernelOrigin(chains=((LAYER, LOOP),)), line_map=[(1,), (wrong,)])
    assert ":99:" not in (launch.stack or "")


def test_unfiltered_the_wrapper_s_own_line_is_there_too() -> None:
    launch = through(KernelOrigin(chains=((TORCH, LAYER, LOOP),)), filter_paths=[])
    assert f"{WRAPPER}:7:call" in (launch.stack or "")
    assert launch.sources == ("/app/model.py:5:block",)


def test_a_generated_line_of_unknown_origin_leaves_the_callers() -> None:
    launch = through(None)
    assert launch.stack == "/app/model.py:18:forward\n/app/train.py:9:main"


def test_a_function_called_launcher_of_the_user_s_own_stays() -> None:
    frames = [("<string>", 4, "launcher"), USER]
    assert describe(frames, NOTHING, DEFAULT, DEFAULT).sources == ("<string>:4:launcher",)
