"""A Triton kernel with two configurations to choose from. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803  Triton reads annotations
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)
