"""Compare what two sides of a differential test see, in one go: on a GPU each question waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from helpers.backend_calls import assert_same
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-7}


def compare(eager: dict[str, Any], fast: dict[str, Any]) -> None:
    """All values of the two sides; one question to the GPU, since it would wait for each."""
    if _differ(eager, fast):
        for name, expected in eager.items():
            try:
                _assert_close(fast[name], expected)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}\neager: {expected}\nbackend: {fast[name]}") from None
        raise AssertionError(f"the sides differ somewhere\neager: {eager}\nbackend: {fast}")


def _differ(eager: dict[str, Any], fast: dict[str, Any]) -> bool:
    wanted, got = (tree_flatten(side) for side in (eager, fast))
    if wanted[1] != got[1]:
        return True
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for expected, found in zip(wanted[0], got[0], strict=True):
        if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
            if type(expected) is not type(found) or expected != found:
                return True
        elif expected.shape != found.shape or expected.dtype != found.dtype:
            return True
        else:
            by_dtype.setdefault(expected.dtype, []).append((expected.detach(), found.detach()))
    with torch.no_grad():
        equal = [
            torch.isclose(*_flat(pairs), rtol=TOLERANCES.get(dtype, 0), atol=TOLERANCES.get(dtype, 0)).all()
            for dtype, pairs in by_dtype.items()
        ]
        return bool(equal) and not torch.stack(equal).all().item()


def _flat(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    flat = [torch.cat([tensor.reshape(-1) for tensor in side]) for side in zip(*pairs, strict=True)]
    return flat[0], flat[1]


def _assert_close(got: Any, expected: Any) -> None:
    floats = [t.dtype for t in tree_leaves(expected) if isinstance(t, Tensor) and t.is_floating_point()]
    tolerance = TOLERANCES[floats[0]] if floats else 0
    assert_same(got, expected, rtol=tolerance, atol=tolerance)
