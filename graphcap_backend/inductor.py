"""The one file that knows Inductor's internals (torch 2.11 to 2.15).

Compile seam: ``compile_with_hooks`` compiles an FX graph through ``compile_fx`` and gives every compiled
subgraph, and every partition of one, to the caller's hooks instead of to torch's CUDA-graph trees. Inductor
keeps its own eligibility checks, caches and partitioning: they end in ``CompiledFxGraph.post_compile``
(also after a cache hit, also for a backward compiled late), which calls ``compile_fx.cudagraphify``. Both
names are replaced once per process by a switch that goes our way only on a thread that is compiling for us.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from graphcap_backend.errors import NotWarmedUpError

# --- compile seam ------------------------------------------------------------------------------------

SCOPE_FRAME = "<graphcap "
"""File name, up to its JSON, of the pseudo frame that carries module path and scope through Inductor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subgraph:
    """What Inductor hands over: one compiled FX graph, or one partition of it."""

    run: Callable[[list[Any]], Sequence[Any]]
    device: torch.device
    static: tuple[int, ...]
    mutated: tuple[int, ...]
    donated: frozenset[int]
    """Inputs made by an earlier partition, which this one may overwrite."""
    constants: tuple[Tensor, ...]
    is_backward: bool
    is_inference: bool
    partition: int
    num_partitions: int
    covers_whole_graph: bool
    """Whether nothing of the FX graph runs outside this callable."""
    sizes: tuple[int, ...] | None
    """Which inputs are symbolic sizes by themselves, and not computed from such; None: all that are ints."""
    where: str | None
    """A line of the user's code that this subgraph came from, "file:line:function"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsafe:
    """A compiled FX graph that Inductor says must not be captured, or that runs on no GPU."""

    reason: str
    on_cpu: bool
    launches: bool
    """False for work on tensors without elements: there is nothing to capture."""
    is_backward: bool
    where: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapper:
    """A generated module and where its kernels come from, by provenance handle ("triton_poi_fused_gelu_0:2")."""

    path: str
    source_code: str
    stack_traces: Mapping[str, Sequence[str]]
    modules: Mapping[str, Sequence[str]]
    annotations: Mapping[str, Sequence[Mapping[str, Any]]]


class Hooks(Protocol):
    """What the backend does with compiled subgraphs."""

    host_capture: bool

    def captured(self, subgraph: Subgraph) -> Callable[[list[Any]], Sequence[Any]]:
        """The callable to use in place of ``subgraph.run``."""

    def unsafe(self, graph: Unsafe) -> None:
        """A graph stays as Inductor made it."""

    def loaded(self, wrapper: Wrapper) -> None:
        """A generated module is in use."""


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
                where=_first_line(kwargs.get("stack_traces") or ()) or _where(graph),
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
    tag = _tag_nodes(gm) + _aliasing(example_inputs)

    def inner(inner_gm: Any, inner_inputs: Any, **kwargs: Any) -> Any:
        # A backward is compiled when it first runs, on whatever thread; before 2.14 patched configuration is
        # the process's, so other compiles must stay out meanwhile.
        with compile_lock, seam.active(hooks), _cache_tag(tag), config.patch(dict(patches)):
            _trace_rewritten(inner_gm)
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


def _tag_nodes(gm: torch.fx.GraphModule) -> str:
    """Put module path and scope of each node in front of its stack trace; return a digest of all.

    Stack traces are what AOTAutograd and Inductor carry to every kernel, forward and backward, cached or not.
    """
    digest = hashlib.sha256()
    for node in gm.graph.nodes:
        # Empty where no line of the user's ran: in a torch.nn.Sequential, say.
        trace = node.meta.get("stack_trace") or ""
        if node.op in ("placeholder", "output"):
            continue
        origin: dict[str, Any] = {}
        if module := _module_path(node.meta.get("nn_module_stack")):
            origin["module"] = module
        if scope := (node.meta.get("custom") or {}).get("graphcap"):
            origin["scope"] = scope
        if origin:
            trace = f'  File "{SCOPE_FRAME}{_quoted(origin)}>", line 1, in scope\n    pass\n{trace}'
            node.meta["stack_trace"] = trace
        digest.update(trace.encode())
    return digest.hexdigest()[:16]


def _trace_rewritten(gm: torch.fx.GraphModule) -> None:
    """Give nodes that a pattern of Inductor's put in the stack trace of what reads them.

    It keeps traces on a pattern's outputs only: of an attention that it fused, the call itself would have none.
    """
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and not node.meta.get("stack_trace"):
            traces = (user.meta.get("stack_trace") for user in node.users)
            if trace := next(filter(None, traces), None):
                node.meta["stack_trace"] = trace


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


def _quoted(origin: Mapping[str, Any]) -> str:
    # Hex keeps quotes and newlines of user values out of a line that others parse.
    return json.dumps(origin, sort_keys=True, default=repr).encode().hex()


def _module_path(stack: Mapping[str, tuple[str, Any]] | None) -> str | None:
    """ "blocks.0.mlp" for the innermost module of Dynamo's nn_module_stack, or None at the top."""
    if not stack:
        return None
    path = list(stack.values())[-1][0]
    path = re.sub(r"_modules\['([^']*)'\]|\['([^']*)'\]", r".\1\2", path)
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    parts = [part for part in path.split(".") if part]
    return ".".join(parts[2:]) or None if parts[:1] == ["L"] else ".".join(parts) or None


def _describe_wrapper(graph: Any) -> Wrapper:
    traces: dict[str, list[str]] = {}
    modules: dict[str, list[str]] = {}
    scopes: dict[str, list[Mapping[str, Any]]] = {}
    for handle, stacks in _stacks_of_calls(graph).items():
        for stack in stacks:
            origin, rest = _split_scope_frame(stack)
            traces.setdefault(handle, []).append(rest)
            if "module" in origin and origin["module"] not in modules.setdefault(handle, []):
                modules[handle].append(origin["module"])
            if "scope" in origin and origin["scope"] not in scopes.setdefault(handle, []):
                scopes[handle].append(origin["scope"])
    code = getattr(graph.current_callable, "__code__", None)
    path = code.co_filename if code is not None else ""
    return Wrapper(
        path=path, source_code=graph.source_code or "", stack_traces=traces, modules=modules, annotations=scopes
    )


def _split_scope_frame(stack: str) -> tuple[dict[str, Any], str]:
    start = stack.find(SCOPE_FRAME)
    if start < 0:
        return {}, stack
    end = stack.index(">", start)
    rest = stack[stack.index("\n", end) + 1 :]
    return read_scope_frame(stack[start : end + 1]), rest.removeprefix("    pass\n")


def read_scope_frame(file: str) -> dict[str, Any]:
    """What the pseudo frame with this file name carries: "module", a path, and "scope", an annotation, if known."""
    origin: dict[str, Any] = json.loads(bytes.fromhex(file[len(SCOPE_FRAME) : -1]).decode())
    return origin


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


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def _first_line(stack_traces: Sequence[str | None]) -> str | None:
    """Innermost user line of the first stack trace there is."""
    for trace in stack_traces:
        frames = [frame for frame in _FRAME.findall(trace or "") if not frame[0].startswith(SCOPE_FRAME)]
        if frames:
            return ":".join(frames[-1])
    return None


_HANDLES = re.compile(r"# \[Provenance debug handles\] (.+)$", re.MULTILINE)


def _where(graph: Any, reason: str = "") -> str | None:
    """A line for messages: the one Inductor names in its reason, else the first kernel's."""
    if line := _first_line([reason]):
        return line
    return _first_line([stack for stacks in _stacks_of_calls(graph).values() for stack in stacks])


def _stacks_of_calls(graph: Any) -> dict[str, list[str]]:
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


class HostKernelSink(Protocol):
    """Who gets the kernel calls of generated modules, for calls on ``thread``."""

    thread: int

    def launch_kernel(
        self, name: str, kernel: Callable[..., Any], args: tuple[Any, ...], writes: Sequence[bool]
    ) -> None:
        """Take the place of ``kernel(*args)``; ``writes`` says which arguments it may write."""

    def allocate(self, allocate: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Take the place of ``allocate(*args)``, which makes an uninitialised buffer."""


class _Patch:
    """Stands where a generated module had a function, for as long as a capture needs it.

    It carries the captures that wait for calls, by thread, so that captures of several threads
    may come and go in any order; calls of other threads go straight through.
    """

    lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.sinks: dict[int, HostKernelSink] = {}

    @classmethod
    def add(cls, owner: Any, name: str, sink: HostKernelSink, make: Callable[..., _Patch]) -> None:
        with cls.lock:
            patch = owner.__dict__[name]
            if not isinstance(patch, cls):
                patch = make(patch)
                setattr(owner, name, patch)
            patch.sinks[sink.thread] = sink

    @classmethod
    def remove(cls, owner: Any, name: str, sink: HostKernelSink) -> None:
        with cls.lock:
            patch = owner.__dict__.get(name)
            if isinstance(patch, cls):
                patch.sinks.pop(sink.thread, None)
                if not patch.sinks:
                    setattr(owner, name, patch.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


class _KernelPatch(_Patch):
    def __init__(self, original: Callable[..., Any], name: str, types: Sequence[str]) -> None:
        super().__init__(original)
        self.name, self.types = name, types

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sink = self.sinks.get(threading.get_ident())
        if sink is None or kwargs:
            return self.original(*args, **kwargs)
        known = self.types if len(self.types) == len(args) else ("",) * len(args)
        writes = [not argument_type.startswith("const ") for argument_type in known]
        return sink.launch_kernel(self.name, self.original, args, writes)


class _AllocationPatch(_Patch):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sink = self.sinks.get(threading.get_ident())
        if sink is None or kwargs:
            return self.original(*args, **kwargs)
        return sink.allocate(self.original, args)


class _LoaderPatch(_Patch):
    """In place of ``PyCodeCache.load_by_key_path``: modules compiled inside a capture."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.patched: list[tuple[HostKernelSink, ModuleType]] = []

    def __get__(self, instance: Any, owner: type) -> Callable[..., ModuleType]:
        def load(*args: Any, **kwargs: Any) -> ModuleType:
            module: ModuleType = self.original.__get__(instance, owner)(*args, **kwargs)
            with _Patch.lock:
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
        if isinstance(value, _KernelPatch) or (isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel")
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
        _Patch.add(module, name, sink, functools.partial(_KernelPatch, name=name, types=types))
    if "empty_strided_cpu" in vars(module):
        _Patch.add(module, "empty_strided_cpu", sink, _AllocationPatch)


def _unpatch_module(module: ModuleType, sink: HostKernelSink) -> None:
    for name in [name for name, value in vars(module).items() if isinstance(value, _Patch)]:
        _Patch.remove(module, name, sink)


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
    with _Patch.lock:
        for module in modules.values():
            _patch_module(module, sink)
        _Patch.add(cache, "load_by_key_path", sink, _LoaderPatch)
        loader = cache.__dict__["load_by_key_path"]
    try:
        yield
    finally:
        with _Patch.lock:
            late = [module for owner, module in loader.patched if owner is sink]
            loader.patched = [pair for pair in loader.patched if pair[0] is not sink]
            for module in (*modules.values(), *late):
                _unpatch_module(module, sink)
            _Patch.remove(cache, "load_by_key_path", sink)


# --- end of host kernels ----------------------------------------------------------------------


# --- calls of compiled regions (capture/liveness) ---------------------------------------------


class CompiledCallSink(Protocol):
    """Who is shown the calls of compiled regions on ``thread``."""

    thread: int

    def call_compiled(self, call: Callable[[Any], Any], inputs: Any) -> Any:
        """Return ``call(inputs)``; ``inputs`` is the list of all the region reads, which the call may clear."""


class _CallPatch(_Patch):
    """In place of ``CompiledFxGraph.__call__``."""

    def __get__(self, instance: Any, owner: type) -> Callable[[Any], Any]:
        call: Callable[[Any], Any] = self.original.__get__(instance, owner)
        sink = cast(CompiledCallSink | None, self.sinks.get(threading.get_ident()))
        return call if sink is None else functools.partial(sink.call_compiled, call)


@contextlib.contextmanager
def compiled_calls_shown(sink: CompiledCallSink) -> Iterator[None]:
    """While open, calls of Inductor's compiled regions on the sink's thread go through it."""
    output_code = sys.modules.get("torch._inductor.output_code")
    if output_code is None:
        yield
        return
    region = output_code.CompiledFxGraph
    _Patch.add(region, "__call__", cast(Any, sink), _CallPatch)
    try:
        yield
    finally:
        _Patch.remove(region, "__call__", cast(Any, sink))


# --- end of calls of compiled regions ---------------------------------------------------------


# --- line maps (annotate) -----------------------------------------------------------------------------


def line_maps() -> dict[str, Any]:
    """A shallow copy of Inductor's map of generated modules: path to (first lines, formatted stacks).

    ``torch._dynamo.reset`` empties the original. Only for a process where Inductor is loaded already.
    """
    from torch._inductor.codecache import PyCodeCache

    return dict(PyCodeCache.linemaps)


# --- end of line maps ---------------------------------------------------------------------------------
