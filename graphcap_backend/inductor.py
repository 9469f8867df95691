"""The one file that knows Inductor's internals (torch 2.11 to 2.15).

Compile seam: ``compile_with_hooks`` compiles an FX graph through ``compile_fx`` and gives every compiled
subgraph, and every partition of one, to the caller's hooks instead of to torch's CUDA-graph trees. Inductor
keeps its own eligibility checks, caches and partitioning: they end in ``CompiledFxGraph.post_compile``
(also after a cache hit, also for a backward compiled late), which calls ``compile_fx.cudagraphify``. Both
names are replaced once per process by a switch that goes our way only on a thread that is compiling for us.

The other sections are what captures and stacks need of generated modules: calls of their kernels, calls of whole
regions, their line maps. What needs no Inductor is elsewhere: the data handed over (``compiled_graphs``), FX stack
traces (``fx_traces``), functions replaced for a while (``call_patches``).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from graphcap_backend.call_patches import (
    AllocationPatch,
    CompiledCallSink,
    HostKernelSink,
    KernelPatch,
    Patch,
    RegionPatch,
)
from graphcap_backend.compiled_graphs import Hooks, Subgraph, Unsafe, Wrapper, describe_wrapper
from graphcap_backend.errors import NotWarmedUpError
from graphcap_backend.fx_traces import innermost_line, tag_nodes, trace_untraced

# --- compile seam ------------------------------------------------------------------------------------


class _Compile:
    """One thread's compile for our hooks, and the compiled graph it is at."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.graph: Any = None
        self.num_wrapped = 0


class _Seam:
    """The switch at ``compile_fx.cudagraphify``; calling it is calling cudagraphify."""

    def __init__(self, cudagraphify: Callable[..., Any], post_compile: Callable[..., None]) -> None:
        self._cudagraphify = cudagraphify
        self._post_compile = post_compile
        self._thread = threading.local()

    @contextlib.contextmanager
    def active(self, hooks: Hooks) -> Iterator[None]:
        outer = getattr(self._thread, "compile", None)
        self._thread.compile = _Compile(hooks)
        try:
            yield
        finally:
            self._thread.compile = outer

    def post_compile(self, graph: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """In place of ``CompiledFxGraph.post_compile``."""
        compile_ = getattr(self._thread, "compile", None)
        if compile_ is None:
            return self._post_compile(graph, example_inputs, constants, graph_kwargs)
        from torch._inductor.utils import BoxedBool

        hooks = compile_.hooks
        hooks.loaded(_describe_wrapper(graph))
        unsafe = _unsafe_reason(graph)
        # A box of our own: Inductor empties it for one graph and would take the others along.
        ours = {**graph_kwargs, "cudagraphs": BoxedBool(unsafe is None)}
        outer, compile_.graph, compile_.num_wrapped = compile_.graph, graph, 0
        try:
            self._post_compile(graph, example_inputs, constants, ours)
        finally:
            compile_.graph = outer
        if unsafe is not None:
            if unsafe.on_cpu and hooks.host_capture and graph.current_callable is not None:
                graph.current_callable = hooks.captured(_whole_cpu_graph(graph, constants))
            else:
                hooks.unsafe(unsafe)
        elif compile_.num_wrapped == 0 and not _partitions(graph):
            hooks.unsafe(_unsafe(graph, "no part of it can be captured: no partition was left to capture"))
        return None

    def __call__(self, model: Any, static_input_idxs: Sequence[int] = (), **kwargs: Any) -> Any:
        compile_ = getattr(self._thread, "compile", None)
        if compile_ is None or compile_.graph is None:
            return self._cudagraphify(model, static_input_idxs, **kwargs)
        graph = compile_.graph
        index = compile_.num_wrapped
        compile_.num_wrapped += 1
        num_partitions = max(1, len(_partitions(graph)))
        placeholders = kwargs.get("placeholders", ())
        return compile_.hooks.captured(
            Subgraph(
                run=model,
                device=torch.device("cuda", kwargs["device_index"]),
                static=tuple(static_input_idxs),
                mutated=tuple(kwargs.get("mutated_input_idxs", ())),
                donated=frozenset(i for i, p in enumerate(placeholders) if p.name.startswith("partition_")),
                constants=tuple(kwargs.get("constants", ())),
                is_backward=bool(kwargs["is_backward"]),
                is_inference=bool(kwargs["is_inference"]),
                partition=index,
                num_partitions=num_partitions,
                covers_whole_graph=num_partitions == 1 and _only_calls_partition(graph),
                sizes=None if _partitions(graph) else _sizes(graph),  # partitions take plain sizes only
                where=innermost_line(kwargs.get("stack_traces") or ()) or _where(graph),
            )
        )


def _seam() -> _Seam:
    """The process's switch, put in place by the first compile."""
    from torch._inductor import compile_fx
    from torch._inductor.output_code import CompiledFxGraph

    seam: Any = compile_fx.cudagraphify
    if not isinstance(seam, _Seam):
        seam = _Seam(compile_fx.cudagraphify, CompiledFxGraph.post_compile)

        def post_compile(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
            seam.post_compile(self, example_inputs, constants, graph_kwargs)

        compile_fx.cudagraphify = seam
        CompiledFxGraph.post_compile = post_compile  # type: ignore[method-assign]
    assert isinstance(seam, _Seam)
    return seam


def inductor_patches(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's configuration for ``mode=`` and ``options=`` of torch.compile.

    Raises:
        ValueError: an option or mode that Inductor does not know; the message lists the valid ones.
    """
    from torch._inductor import config, list_mode_options

    patches: dict[str, Any] = {}
    if mode and mode != "default":
        modes = list_mode_options()
        if mode not in modes:
            raise ValueError(f"mode must be one of {sorted(modes)}, found {mode!r}")
        patches.update(list_mode_options(mode))
    known = config.get_config_copy()
    for key, value in options.items():
        name = key.replace("-", "_")
        if name not in known:
            import dataclasses

            from graphcap_backend.options import GraphcapOptions

            ours = [field.name for field in dataclasses.fields(GraphcapOptions)]
            raise ValueError(
                f"unknown option {key!r}; expected one of graphcap's {ours} or of torch._inductor.list_options()"
            )
        patches[name] = value
    patches["triton.cudagraphs"] = True
    # Trees off would specialise every symbolic size; the trees themselves are never made.
    patches["triton.cudagraph_trees"] = True
    # Level 1 writes a handle beside each kernel call of the wrapper and keeps what was fused into it.
    patches["trace.provenance_tracking_level"] = max(1, patches.get("trace.provenance_tracking_level", 1))
    return patches


def compile_with_hooks(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks, patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile ``gm`` through Inductor and AOTAutograd; compiled subgraphs go to ``hooks``, now and later."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.utils import BoxedBool

    seam = _seam()
    tag = tag_nodes(gm) + _aliasing(example_inputs) + _donation()

    def inner(inner_gm: Any, inner_inputs: Any, **kwargs: Any) -> Any:
        # A backward is compiled when it first runs, on whatever thread; before 2.14 patched configuration is
        # the process's, so other compiles must stay out meanwhile.
        with compile_lock, seam.active(hooks), _cache_tag(tag), config.patch(dict(patches)):
            # A pattern of Inductor's keeps traces on its outputs only: of an attention that it fused, the call
            # itself would have none.
            trace_untraced(inner_gm)
            return compile_fx_inner(inner_gm, inner_inputs, **{**kwargs, "cudagraphs": BoxedBool(True)})

    with compile_lock, seam.active(hooks), _cache_tag(tag):
        compiled = compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=dict(patches))
    assert callable(compiled)
    return compiled


@contextlib.contextmanager
def _cache_tag(tag: str) -> Iterator[None]:
    """Keep compiled code whose source lines or scopes differ apart in Inductor's caches.

    Their keys leave stack traces out, so a hit could bring the lines of another file.
    """
    from torch.compiler import config

    with config.patch(cache_key_tag=f"{config.cache_key_tag}{tag}"):  # type: ignore[attr-defined]
        yield


def _aliasing(inputs: Sequence[Any]) -> str:
    """Which inputs share memory, and where in it they lie; empty when none do.

    The key of AOTAutograd's cache leaves it out, so a hit could bring code made for other overlaps.
    """
    by_storage: dict[int, list[str]] = {}
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.layout is torch.strided:
            place = f"{i}+{value.storage_offset()}"
            by_storage.setdefault(value.untyped_storage()._cdata, []).append(place)
    return ";".join(",".join(places) for places in by_storage.values() if len(places) > 1)


def _donation() -> str:
    """Whether the backward may not overwrite what the forward saved for it; empty when it may, as is the default.

    The keys of both caches leave it out, so a hit could bring a backward that gives other gradients the second time.
    """
    from torch._functorch import config

    return "" if config.donated_buffer else ";nothing donated"


def _describe_wrapper(graph: Any) -> Wrapper:
    code = getattr(graph.current_callable, "__code__", None)
    return describe_wrapper(
        path=code.co_filename if code is not None else "",
        source_code=graph.source_code or "",
        traces_by_handle=_traces_of_calls(graph),
    )


def _partitions(graph: Any) -> Sequence[Any]:
    return graph.partition_maps or ()


_ARGUMENTS = re.compile(r"def call\(.*\n +(.*?),? = args\n")
_SIZE = re.compile(r"^ +[su]\d+ = (\w+)$", re.MULTILINE)


def _sizes(graph: Any) -> tuple[int, ...] | None:
    """Inputs that the generated module takes for a symbol (``s77 = arg0_1``); a backward gets products of them, too."""
    found = _ARGUMENTS.search(graph.source_code or "")
    if found is None:
        return None
    names = found[1].split(", ")
    symbols = set(_SIZE.findall(graph.source_code, found.end()))
    return tuple(i for i, name in enumerate(names) if name in symbols)


_LAUNCHES_NOTHING = frozenset(
    {
        "clear",
        "size",
        "stride",
        "reinterpret_tensor",
        "get_raw_stream",
        "_DeviceGuard",
        "set_device",
        "assert_size_stride",
        "assert_size_stride_grouped",
        "assert_alignment",
    }
)


def _only_calls_partition(graph: Any) -> bool:
    """Whether ``Runner.call`` of the generated module does nothing but call its partition: all else is unknown."""
    if not _partitions(graph):
        return True
    source = graph.source_code or ""
    start = source.find("    def call(self, args):")
    try:
        body = ast.parse(textwrap.dedent(source[start : source.find("\nrunner = ", start)]) if start >= 0 else "?")
    except SyntaxError:
        return False
    called = [ast.unparse(node.func) for node in ast.walk(body) if isinstance(node, ast.Call)]
    return all(func.startswith("self.partitions[") or func.rpartition(".")[2] in _LAUNCHES_NOTHING for func in called)


def _unsafe_reason(graph: Any) -> Unsafe | None:
    if graph.disabled_cudagraphs_reason:
        return _unsafe(graph, graph.disabled_cudagraphs_reason)
    info = graph.cudagraph_info
    if info is None:
        return _unsafe(graph, "it does not run on a GPU" if _on_cpu(graph) else "Inductor left no capture information")
    if info.cudagraph_fail_reasons:
        return _unsafe(graph, ", ".join(info.cudagraph_fail_reasons))
    if not any(device != "cpu" for device in graph.device_types):
        return _unsafe(graph, "it does not run on a GPU")
    if len(graph.device_idxs) > 1:
        return _unsafe(graph, f"it runs on several GPUs: {sorted(graph.device_idxs)}")
    return None


def _on_cpu(graph: Any) -> bool:
    return set(graph.device_types) <= {"cpu"}


def _unsafe(graph: Any, reason: str) -> Unsafe:
    return Unsafe(
        reason=reason.strip(),
        on_cpu=_on_cpu(graph),
        launches="Provenance debug handles" in (graph.source_code or ""),
        is_backward=bool(graph.fx_kwargs.get("is_backward")),
        where=_where(graph, reason),
    )


_HANDLES = re.compile(r"# \[Provenance debug handles\] (.+)$", re.MULTILINE)


def _where(graph: Any, reason: str = "") -> str | None:
    """A line for messages: the one Inductor names in its reason, else the first kernel's."""
    if line := innermost_line([reason]):
        return line
    return innermost_line([stack for stacks in _traces_of_calls(graph).values() for stack in stacks])


def _traces_of_calls(graph: Any) -> dict[str, list[str]]:
    """Stack traces of what each kernel call of a wrapper was made from, by the handle written beside the call.

    A backward that is compiled when it first runs comes with the stacks of those compiled before it, too.
    """
    known = json.loads(graph.inductor_provenance_stack_traces_str or "{}")
    handles = (name.strip() for names in _HANDLES.findall(graph.source_code or "") for name in names.split(","))
    return {handle: known[handle] for handle in handles if handle in known}


def _whole_cpu_graph(graph: Any, constants: Any) -> Subgraph:
    tensors = [value for value in constants.unwrap(graph).values() if isinstance(value, Tensor)]
    return Subgraph(
        run=graph.current_callable,
        device=torch.device("cpu"),
        static=tuple(graph.fx_kwargs.get("static_input_idxs") or ()),
        mutated=tuple(graph.mutated_input_idxs),
        donated=frozenset(),
        constants=tuple(tensors),
        is_backward=bool(graph.fx_kwargs.get("is_backward")),
        is_inference=bool(graph.fx_kwargs.get("is_inference")),
        partition=0,
        num_partitions=1,
        covers_whole_graph=True,
        sizes=_sizes(graph),
        where=_where(graph),
    )


# --- Host kernels (HostGraph) ---------------------------------------------------------------


class _LoaderPatch(Patch[HostKernelSink]):
    """In place of ``PyCodeCache.load_by_key_path``: modules compiled inside a capture."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.patched: list[tuple[HostKernelSink, ModuleType]] = []

    def __get__(self, instance: Any, owner: type) -> Callable[..., ModuleType]:
        def load(*args: Any, **kwargs: Any) -> ModuleType:
            module: ModuleType = self.original.__get__(instance, owner)(*args, **kwargs)
            with Patch.lock:
                for sink in self.sinks.values():
                    _patch_module(module, sink)
                    self.patched.append((sink, module))
            return module

        return load


_KERNEL_DEFINITION = re.compile(r"^(\w+) = \w*async_compile\.cpp_pybinding\((\[[^\]]*\]),", re.M)


def _host_kernels(module: ModuleType) -> dict[str, Sequence[str]]:
    """Names of the C++ kernels of a generated module, with their C++ argument types."""
    types = _argument_types(getattr(module, "__file__", None) or "")
    return {
        name: types.get(name, ())
        for name, value in vars(module).items()
        if isinstance(value, KernelPatch) or (isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel")
    }


@functools.lru_cache(maxsize=1024)
def _argument_types(path: str) -> Mapping[str, Sequence[str]]:
    """C++ argument types of the kernels that a generated file defines; its name tells its content."""
    try:
        source = Path(path).read_text() if path else ""
    except OSError:  # the cache's files may be gone; the loaded functions are not
        source = ""
    return {name: ast.literal_eval(text) for name, text in _KERNEL_DEFINITION.findall(source)}


def _patch_module(module: ModuleType, sink: HostKernelSink) -> None:
    kernels = {}
    if "async_compile" in vars(module) or "empty_strided_cpu" in vars(module):
        kernels = _host_kernels(module)
    for name, types in kernels.items():
        Patch.add(module, name, sink, functools.partial(KernelPatch, name=name, types=types))
    if "empty_strided_cpu" in vars(module):
        Patch.add(module, "empty_strided_cpu", sink, AllocationPatch)


def _unpatch_module(module: ModuleType, sink: HostKernelSink) -> None:
    for name in [name for name, value in vars(module).items() if isinstance(value, Patch)]:
        Patch.remove(module, name, sink)


@contextlib.contextmanager
def host_kernels_recorded(sink: HostKernelSink) -> Iterator[None]:
    """While open, kernels of Inductor's generated CPU modules called on the sink's thread go to it.

    Extern calls (``aten.addmm.out``) need nothing: they reach dispatch modes. Modules that are
    compiled in the meantime are covered.

    Raises:
        NotWarmedUpError: at the end, when Inductor itself was first loaded in the meantime.
    """
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is None:
        yield
        codecache = sys.modules.get("torch._inductor.codecache")
        if codecache is not None and codecache.PyCodeCache.modules:
            raise NotWarmedUpError(
                "a function was compiled by torch.compile for the first time in this process inside a host capture; "
                "its kernels ran and were not recorded. Call it once before the capture"
            )
        return
    cache = codecache.PyCodeCache
    # Clearing Inductor's caches forgets modules whose functions may still be called.
    prefix = "torch._inductor.runtime.compile_tasks."
    named = [module for name, module in list(sys.modules.items()) if name.startswith(prefix)]
    modules = {id(module): module for module in (*cache.modules, *named)}
    with Patch.lock:
        for module in modules.values():
            _patch_module(module, sink)
        Patch.add(cache, "load_by_key_path", sink, _LoaderPatch)
        loader = cache.__dict__["load_by_key_path"]
    try:
        yield
    finally:
        with Patch.lock:
            late = [module for owner, module in loader.patched if owner is sink]
            loader.patched = [pair for pair in loader.patched if pair[0] is not sink]
            for module in (*modules.values(), *late):
                _unpatch_module(module, sink)
            Patch.remove(cache, "load_by_key_path", sink)


# --- calls of compiled regions (capture/liveness) ---------------------------------------------


@contextlib.contextmanager
def compiled_calls_shown(sink: CompiledCallSink) -> Iterator[None]:
    """While open, calls of Inductor's compiled regions on the sink's thread go through it."""
    output_code = sys.modules.get("torch._inductor.output_code")
    if output_code is None:
        yield
        return
    region = output_code.CompiledFxGraph
    Patch.add(region, "__call__", sink, RegionPatch)
    try:
        yield
    finally:
        Patch.remove(region, "__call__", sink)


# --- line maps (annotate) -----------------------------------------------------------------------------


def line_maps() -> dict[str, Any]:
    """A shallow copy of Inductor's map of generated modules: path to (first lines, formatted stacks).

    ``torch._dynamo.reset`` empties the original. Only for a process where Inductor is loaded already.
    """
    from torch._inductor.codecache import PyCodeCache

    return dict(PyCodeCache.linemaps)
