"""CUPTI, the driver and cuda-bindings as a machine may have them: what is called, and what is said."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stub_library import build, called

from graphcap_backend.annotate import cupti, edge_walk
from graphcap_backend.annotate.config import AnnotationConfig
from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.annotate.recording import Recording, source_ids_available
from graphcap_backend.capture.cuda_nodes import read_cuda_nodes
from graphcap_backend.capture.template import ClonedTemplate
from graphcap_backend.errors import CudaError, CuptiBusyError, CuptiError, CuptiMissingError, GraphcapError

Install = Callable[..., Path]
BUSY, ANY_ERROR = 39, 7


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Builds a libcupti and makes it the one that is loaded, beside a torch for CUDA 97."""
    found: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "97.0")  # of which no machine has libraries
    monkeypatch.setattr(cupti, "_loaded", lambda: found)
    monkeypatch.setattr(PROCESS, "_warned", set())
    monkeypatch.delitem(sys.modules, "cupti.cupti", raising=False)  # another test may have imported cupti-python
    cupti._library.cache_clear()

    def install(*, major: int = 97, without: str = "", version: int = 130000, **results: int) -> Path:
        returns = {name: results.get(name, 0) for name in cupti._FUNCTIONS if name != without}
        path = build(tmp_path / f"libcupti.so.{major}", returns, version=version)
        found.append(str(path))
        return path

    yield install
    cupti._library.cache_clear()
    assert PROCESS.callbacks is None


def insist() -> None:
    Recording.start_cuda(AnnotationConfig.parse({"backend": "cupti"}), 0)


def test_no_library(install: Install) -> None:
    with pytest.raises(CuptiMissingError, match=r"found no libcupti.*needed libcupti\.so\.97.*pip install"):
        insist()
    assert not cupti.is_loadable()


def test_of_another_major(install: Install) -> None:
    path = install(major=12)
    with pytest.raises(CuptiMissingError, match=r"another major, .*libcupti\.so\.12.*needed libcupti\.so\.97.*pip"):
        insist()
    assert called(path) == []


def test_too_old_to_have_what_is_needed(install: Install) -> None:
    path = install(without="cuptiGetGraphExecId")
    with pytest.raises(CuptiMissingError, match=r"libcupti\.so\.97, which lacks cuptiGetGraphExecId; needed CUPTI 97"):
        insist()
    assert called(path) == []


def test_ours_from_subscribing_to_finalizing(install: Install) -> None:
    path = install()
    recording = Recording.start_cuda(AnnotationConfig.parse({"backend": "auto"}), 0)
    assert recording.way == "cupti"
    second = Recording.start_cuda(AnnotationConfig.parse({"backend": "auto"}), 0)
    assert called(path) == ["cuptiSubscribe", "cuptiEnableCallback"]
    recording.discard()
    assert len(called(path)) == 2  # the second still records
    second.discard()
    second.discard()
    assert called(path)[2:] == ["cuptiEnableCallback", "cuptiUnsubscribe", "cuptiFinalize"]


def test_somebody_elses_is_not_touched(install: Install) -> None:
    path = install(cuptiSubscribe=BUSY)
    with pytest.raises(CuptiBusyError, match=r"cuptiSubscribe failed.*torch\.profiler.*Nsight"):
        insist()
    with pytest.raises(CuptiBusyError):
        Recording.start_cuda(AnnotationConfig.parse({"record_py_stacks": True}), 0)
    cupti.release_callbacks()
    assert called(path) == ["cuptiSubscribe"] * 2
    # It is up already, so asking for an id changes nothing.
    assert cupti.graph_exec_id(0x1000) == 0
    assert called(path)[2:] == ["cuptiSubscribe", "cuptiGetGraphExecId"]


def test_an_error_while_subscribing_leaves_nothing(install: Install) -> None:
    path = install(cuptiEnableCallback=ANY_ERROR)
    for _ in range(2):
        with pytest.raises(CuptiError, match=r"cuptiEnableCallback failed with CUPTI_ERROR_STUB \(7\)"):
            insist()
        assert (PROCESS.num_recording, PROCESS.callbacks) == (0, None)
    assert called(path) == ["cuptiSubscribe", "cuptiEnableCallback", "cuptiUnsubscribe", "cuptiFinalize"] * 2


def test_not_finalized_with_somebodys_activity_records_on(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    path = install()
    monkeypatch.setitem(sys.modules, "cupti.cupti", sys)
    Recording.start_cuda(AnnotationConfig(), 0).discard()
    assert called(path)[-1] == "cuptiUnsubscribe"


def test_ids_asked_together_take_one_subscription(install: Install) -> None:
    path = install()
    with cupti.asked_together():
        for handle in (0x1000, 0x2000, 0x3000):
            cupti.graph_exec_id(handle)
    assert called(path).count("cuptiGetGraphExecId") == 3
    assert called(path).count("cuptiSubscribe") == called(path).count("cuptiFinalize") == 1
    assert called(path)[-1] == "cuptiFinalize"


def test_giving_it_back_may_fail_and_is_told(install: Install) -> None:
    install(cuptiFinalize=ANY_ERROR)
    with pytest.warns(RuntimeWarning, match="giving CUPTI back failed: cuptiFinalize"):
        assert cupti.graph_exec_id(0x1000) == 0


@pytest.mark.parametrize("problem", ["missing", "busy"])
def test_auto_walks_edges_and_says_so_once(install: Install, problem: str) -> None:
    if problem == "busy":
        install(cuptiSubscribe=BUSY)

    def begin() -> None:
        recording = Recording.start_cuda(AnnotationConfig(), 0)
        assert recording.way == "edge_walk"
        recording.discard()

    with pytest.warns(RuntimeWarning, match="walking the capture graph instead: .*cupti"):
        begin()
    begin()  # warnings are errors here


def test_best_effort_stacks_degrade_where_a_users_would_not(install: Install) -> None:
    with pytest.warns(RuntimeWarning, match="stacks are those of compiled kernels only"):
        recording = Recording.start_cuda(AnnotationConfig(record_py_stacks=True, best_effort=True), 0)
    assert (recording.way, recording.gathers) == ("edge_walk", True)
    recording.discard()


@pytest.mark.parametrize(("cupti_version", "driver"), [(130000, 13040), (130400, 13030), (120900, 12090)])
def test_source_keys_below_13_4(
    install: Install, monkeypatch: pytest.MonkeyPatch, cupti_version: int, driver: int
) -> None:
    path = install(version=cupti_version)
    monkeypatch.setattr(edge_walk, "driver_version", lambda: driver)
    found = f"found CUPTI {cupti_version // 10000}.{cupti_version % 10000 // 100} and a driver for CUDA"
    with pytest.raises(CuptiMissingError, match=rf"{found} .*needed 13\.4 of both.*exec"):
        Recording.start_cuda(AnnotationConfig(key_by="source"), 0)
    assert "cuptiSubscribe" not in called(path)
    assert not source_ids_available()
    Recording.start_cuda(AnnotationConfig(key_by="auto"), 0).discard()


def test_source_keys_from_13_4_on(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(version=130400)
    monkeypatch.setattr(edge_walk, "driver_version", lambda: 13040)
    assert source_ids_available()
    Recording.start_cuda(AnnotationConfig(key_by="source"), 0).discard()


def test_source_keys_without_a_library(install: Install) -> None:
    with pytest.raises(CuptiMissingError, match="found no libcupti"):
        Recording.start_cuda(AnnotationConfig(key_by="source"), 0)
    assert not source_ids_available()


def test_without_cuda_bindings_a_capture_is_good_and_its_nodes_are_not_to_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: tuple[str, ...] = ("cuda.bindings", "cuda.bindings.driver")
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    template: Any = ClonedTemplate(0x1000)  # as at the end of a capture: no error here
    for _ in range(2):
        with pytest.raises(GraphcapError, match=r"not available.*pip install cuda-bindings"):
            template()
    template.drop()


def test_cuda_bindings_too_old_for_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [types.ModuleType(name) for name in ("cuda", "cuda.bindings", "cuda.bindings.driver")]
    modules[1].driver = modules[2]  # type: ignore[attr-defined]
    modules[2].CUgraph = int  # type: ignore[attr-defined]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(CudaError, match=r"cuGraphGetNodes failed with cuda-bindings .*no such function.*--upgrade"):
        read_cuda_nodes(0x1000)
