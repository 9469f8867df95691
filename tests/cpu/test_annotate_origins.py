"""Origins of kernel calls in a generated module."""

from __future__ import annotations

import gc

from graphcap_backend.annotate.origins import known_wrappers, parse_stack, register_wrapper

WRAPPER = '''\
triton_poi_fused_gelu_0 = async_compile.triton("""
# a kernel's own text
""")

def call(self, args):
    buf0 = empty_strided_cuda((4, 16), (16, 1), torch.float32)
    # Topologically Sorted Source Nodes: [h], Original ATen: [aten.t, aten.addmm]
    # [Provenance debug handles] extern_kernels.addmm:1
    extern_kernels.addmm(args[0], args[1],
        args[2], out=buf0)
    del args
    # [Provenance debug handles] triton_poi_fused_gelu_0:2
    stream0 = get_raw_stream(0)
    triton_poi_fused_gelu_0.run(buf0, 64, stream=stream0)
    buf1 = buf0; del buf0  # reuse
    # [Provenance debug handles] triton_poi_fused_gelu_0:3, triton_poi_fused_gelu_0:4
    stream0 = get_raw_stream(0)
    triton_poi_fused_gelu_0.run(buf1, 64, stream=stream0)
    # [Provenance debug handles] torch.ops.aten._scaled_dot_product.default:5
    buf2 = torch.ops.aten._scaled_dot_product.default(buf1)
    return (buf2,)
'''


def frame(line: int, function: str, file: str = "model.py") -> str:
    return f'  File "{file}", line {line}, in {function}\n    code of line {line}\n'


def line_of(text: str, nth: int = 0) -> int:
    return [number for number, line in enumerate(WRAPPER.splitlines(), 1) if text in line][nth]


def test_each_call_site_has_its_own_origin_whatever_the_kernels_name() -> None:
    origins = register_wrapper(
        path="/cache/a.py",
        source_code=WRAPPER,
        stack_traces={
            "extern_kernels.addmm:1": [frame(20, "forward") + frame(3, "block")],
            "triton_poi_fused_gelu_0:2": [frame(20, "forward") + frame(4, "block")],
            "triton_poi_fused_gelu_0:3": [frame(21, "forward") + frame(4, "block")],
            "triton_poi_fused_gelu_0:4": [frame(21, "forward") + frame(5, "block")],
            "torch.ops.aten._scaled_dot_product.default:5": [frame(30, "forward")],
        },
        modules={"triton_poi_fused_gelu_0:2": ["a"], "triton_poi_fused_gelu_0:3": ["b", "b"]},
    )
    gelu = "triton_poi_fused_gelu_0.run"
    first, second = origins.at(line_of(gelu)), origins.at(line_of(gelu, 1))
    assert first is not None
    assert second is not None
    assert first.chains == ((("model.py", 4, "block"), ("model.py", 20, "forward")),)
    assert second.chains == (
        (("model.py", 4, "block"), ("model.py", 21, "forward")),
        (("model.py", 5, "block"), ("model.py", 21, "forward")),
    )
    assert (first.modules, second.modules) == (("a",), ("b",))
    sdpa = origins.at(line_of("buf2 = "))
    assert sdpa is not None
    assert sdpa.chains == ((("model.py", 30, "forward"),),)


def test_a_call_over_several_lines_is_known_on_each() -> None:
    origins = register_wrapper(
        path="/cache/a.py", source_code=WRAPPER, stack_traces={"extern_kernels.addmm:1": [frame(1, "f")]}
    )
    start = line_of("extern_kernels.addmm(")
    assert origins.at(start) is origins.at(start + 1)
    assert origins.at(start) is not None


def test_lines_that_launch_nothing_have_none() -> None:
    origins = register_wrapper(path="/cache/a.py", source_code=WRAPPER, stack_traces={})
    assert origins.at(line_of("del args")) is None
    assert origins.at(line_of("buf1 = buf0")) is None
    assert origins.at(line_of("return")) is None


def test_a_kernel_fused_from_two_scopes_carries_both() -> None:
    handle = "triton_poi_fused_gelu_0:2"
    outer, inner = {"name": "a", "cost": {"x": 1}}, {"name": "b", "cost": {"y": 2}}
    origins = register_wrapper(
        path="/cache/a.py", source_code=WRAPPER, stack_traces={}, annotations={handle: [outer, inner, outer]}
    )
    origin = origins.at(line_of("triton_poi_fused_gelu_0.run"))
    assert origin is not None
    assert origin.annotation == {"name": "a", "cost": {"x": 1, "y": 2}, "fused": [outer, inner]}


def test_text_that_is_no_wrapper_is_no_error() -> None:
    for text in ("", "def (", "# [Provenance debug handles] x:1\n", "# [Provenance debug handles] \nf()\n"):
        assert register_wrapper(path="/cache/b.py", source_code=text, stack_traces={}).at(1) is None


def test_known_by_path_as_long_as_somebody_holds_it_the_newest_first() -> None:
    old = register_wrapper(path="/cache/c.py", source_code=WRAPPER, stack_traces={})
    new = register_wrapper(path="/cache/c.py", source_code=WRAPPER, stack_traces={})
    assert known_wrappers()["/cache/c.py"] is new
    del new
    gc.collect()
    assert known_wrappers()["/cache/c.py"] is old
    del old
    gc.collect()
    assert "/cache/c.py" not in known_wrappers()


def test_stacks_as_python_formats_them() -> None:
    text = (
        '  File "/a b/<weird>.py", line 3, in <lambda>\n    x = "File \\"y\\", line 1, in z"\n'
        + frame(4, "f", "<ipython-input-3>")
        + "Gradient addition node due to multiple use of tensor around:"
    )
    assert parse_stack(text) == (("<ipython-input-3>", 4, "f"), ("/a b/<weird>.py", 3, "<lambda>"))
    assert parse_stack("") == ()
