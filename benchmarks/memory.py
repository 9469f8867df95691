"""Reserved memory after eight batch sizes; each side in a process of its own.

``python -m benchmarks.memory SIDE DEVICE RESULTS`` (``dropped`` or ``held``) measures one side and prints its numbers
as JSON.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import torch

from benchmarks import models
from benchmarks.rows import Row, Target, ratio_row
from benchmarks.settings import Settings

SIDES = ("reduce-overhead", "graphcap")
SIZES = tuple(64 << power for power in range(8))
WIDTH, NUM_LAYERS, CALLS_PER_SIZE = 2048, 6, 5
_TIME_LIMIT_S = 90
_MIB = 1 << 20


def memory(settings: Settings) -> list[Row]:
    """6 x (Linear 2048 + GELU), batches of 64 to 8192; results dropped, and the last one held as in ``y = f(x)``.

    What reduce-overhead hands out is overwritten by the next call, so that holding it costs no memory there.
    """
    what = f"reserved memory after {len(SIZES)} batch sizes, {SIZES[0]} to {SIZES[-1]}, of a {NUM_LAYERS}-layer MLP"
    rows = []
    for results in ("dropped", "held"):
        sides = {side: _in_fresh_process(side, settings.device, results) for side in SIDES}
        for key, text, target in (
            ("reserved", f"{what}, results {results}", Target(bar=1.00, aim=0.80)),
            ("emptied", f"{what}, results {results}, after torch.cuda.empty_cache()", None),
        ):
            samples = {side: [values[key] / _MIB] for side, values in sides.items()}
            rows.append(
                ratio_row(
                    f"memory/{key}-{results}",
                    text,
                    samples,
                    ours="graphcap",
                    theirs="reduce-overhead",
                    unit="MiB",
                    target=target,
                    note=f"of which weights: {sides['graphcap']['weights'] / _MIB:.0f} MiB",
                )
            )
    return rows


def _in_fresh_process(side: str, device: str, results: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", side, device, results],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=_TIME_LIMIT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"measuring {side} in a process of its own ended with status {done.returncode}; see above")
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def _measure(side: str, device: str, results: str) -> dict[str, float]:
    torch.set_float32_matmul_precision("high")
    width, sizes = (WIDTH, SIZES) if device == "cuda" else (32, SIZES[:3])
    model = models.Mlp(NUM_LAYERS, width).to(device).eval()
    compiled = models.compile_side(side, model, device)
    with torch.no_grad():
        for number_of_calls in (CALLS_PER_SIZE, 2):
            for size in sizes:
                x = torch.randn(size, width, device=device)
                for _ in range(number_of_calls):
                    y = compiled(x)
                    if results == "dropped":
                        y = None
    reserved = _reserved(device)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    emptied = _reserved(device)
    with torch.no_grad():  # last: eager's own temporaries would count
        models.assert_close(compiled(x) if y is None else y, model(x), side)
    return {"reserved": reserved, "emptied": emptied, "weights": weights}


def _reserved(device: str) -> float:
    if device != "cuda":
        return _MIB
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved()


ROWS = {"memory": memory}

if __name__ == "__main__":
    print(json.dumps(_measure(*sys.argv[1:4])))
