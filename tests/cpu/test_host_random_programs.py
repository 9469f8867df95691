"""Random programs on random layouts: captured, inputs changed in place, replayed, compared.

A program is a list of steps on a growing list of tensors. Running it again on copies of the
inputs, with the same layouts, gives the values that the replay must have left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from helpers.host_captures import captured
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphcap_backend.errors import CaptureError

DTYPES = (torch.float32, torch.complex64, torch.bool, torch.int8, torch.bfloat16, torch.int64)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A tensor of shape (rows, 3) on a base of 16 elements, or of none."""

    dtype: torch.dtype
    rows: int
    strides: tuple[int, int]
    offset: int
    conj: bool

    def on(self, base: Tensor) -> Tensor:
        view = base.as_strided((self.rows, 3), self.strides, self.offset)
        return view.conj() if self.conj and self.dtype.is_complex else view


# Dense, transposed, row expanded, column expanded, overlapping windows, with gaps.
STRIDES = ((3, 1), (1, 3), (0, 1), (1, 0), (1, 1), (4, 1), (5, 2))

layouts = st.builds(
    Layout,
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from((3, 3, 3, 0, 1)),
    strides=st.sampled_from(STRIDES),
    offset=st.integers(0, 1),
    conj=st.booleans(),
)

Step = Callable[[list[Tensor], int, int], Tensor | None]


def _writable(tensor: Tensor) -> bool:
    return torch._debug_has_internal_overlap(tensor) == 0 and tensor.is_contiguous()


def _unary(function: Callable[[Tensor], Tensor]) -> Step:
    return lambda pool, i, j: function(pool[i])


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Step:
    return lambda pool, i, j: function(pool[i], pool[j])


def _in_place(function: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def step(pool: list[Tensor], i: int, j: int) -> None:
        if _writable(pool[i]) and (pool[i].is_complex() or not pool[j].is_complex()):
            function(pool[i], pool[j])

    return step


def _born(pool: list[Tensor], i: int, j: int) -> Tensor:
    fresh = torch.zeros(pool[i].shape, dtype=torch.complex64)
    fresh.add_(pool[i])
    return fresh


STEPS: dict[str, Step] = {
    "add": _binary(torch.add),
    "mul": _binary(torch.mul),
    "where": _binary(lambda a, b: torch.where(a != 0, a, b)),
    "cat": _binary(lambda a, b: torch.cat([a, b])),
    "stack_sum": _binary(lambda a, b: torch.stack([a, b]).sum(0)),
    "clone": _unary(torch.clone),
    "empty_clone": _unary(lambda a: torch.empty_like(a).copy_(a)),
    "transpose": _unary(lambda a: a.t()),
    "expand": _unary(lambda a: a[:, :1].expand(a.shape[0], 3)),
    "reshape": _unary(lambda a: a.reshape(-1).reshape(a.shape)),
    "slice": _unary(lambda a: a[::2]),
    "sum": _unary(lambda a: a.sum(0, keepdim=True)),
    "cumsum": _unary(lambda a: a.cumsum(0)),
    "flip": _unary(lambda a: a.flip(0)),
    "to_float": _unary(lambda a: (a.real if a.is_complex() else a).to(torch.float32)),
    "to_complex": _unary(lambda a: a.to(torch.complex64).conj()),
    "imag": _unary(lambda a: a.conj().imag if a.is_complex() else a.logical_not()),
    "born": _born,
    "constant": _unary(lambda a: a + torch.tensor([1, 0, 1])[: a.shape[-1]].sum()),
    "gather": _unary(lambda a: a[torch.arange(a.shape[0]).flip(0)]),
    "copy_": _in_place(lambda a, b: a.copy_(b)),
    "add_": _in_place(lambda a, b: a.add_(b) if torch.can_cast(torch.result_type(a, b), a.dtype) else a),
    "zero_": _in_place(lambda a, b: a.zero_()),
    "fill_": _in_place(lambda a, b: a.fill_(1)),
    "row_": _in_place(lambda a, b: a[:1].mul_(2) if a.dtype != torch.bool else a),
    "conj_": _in_place(lambda a, b: a.conj().copy_(b)),
    "transposed_": _in_place(lambda a, b: a.t().fill_(1)),
}

programs = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=8
)


def _run(program: Sequence[tuple[str, int, int]], inputs: Sequence[Tensor]) -> list[Tensor]:
    pool = list(inputs)
    for name, i, j in program:
        try:
            made = STEPS[name](pool, i % len(pool), j % len(pool))
        except CaptureError:
            raise
        except (RuntimeError, IndexError):  # shapes or dtypes that do not fit
            continue
        if made is not None:
            pool.append(made)
    return pool


def _random_base(dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    numbers = torch.randint(-3, 4, (2, 16), generator=generator)
    if dtype.is_complex:
        return torch.complex(numbers[0].float(), numbers[1].float())
    return numbers[0].to(dtype)


def _assert_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a, b) or torch.allclose(a, b, equal_nan=True)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layouts=st.lists(layouts, min_size=1, max_size=3),
    shared=st.booleans(),
    program=programs,
    seed=st.integers(0, 2**31),
)
def test_replay_equals_running_the_program_again(
    layouts: list[Layout], shared: bool, program: list[tuple[str, int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Inputs of one dtype may be views of one base, so that they alias each other.
    bases: dict[object, Tensor] = {}
    keys = [layout.dtype if shared else number for number, layout in enumerate(layouts)]
    for key, layout in zip(keys, layouts, strict=True):
        bases.setdefault(key, _random_base(layout.dtype, generator))
    inputs = [layout.on(bases[key]) for key, layout in zip(keys, layouts, strict=True)]
    before = {key: base.clone() for key, base in bases.items()}

    graph, pool = captured(lambda: _run(program, inputs))
    for key, base in bases.items():
        assert torch.equal(base, before[key])

    for _ in range(2):
        for base in bases.values():
            base.copy_(_random_base(base.dtype, generator))
        again = {key: base.clone() for key, base in bases.items()}
        graph.replay()
        expected = _run(program, [layout.on(again[key]) for key, layout in zip(keys, layouts, strict=True)])
        _assert_same(pool, expected)
        _assert_same(list(bases.values()), list(again.values()))
