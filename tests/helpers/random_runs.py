"""Run random programs in eager and through the backend; a failure prints the program and its calls."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from helpers.backend_calls import compiled, fresh_compiler, parts
from helpers.random_calls import Variety
from helpers.random_programs import Program, RandomModule, module_of
from helpers.random_sequences import CallSequence, Side
from helpers.shared_memory import shared_from
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

CALLS = 8
"""Of one sequence."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How often captured parts were replayed, and how often they ran uncaptured."""

    replays: int
    fallbacks: int
    like_inductor: int
    """Programs that plain Inductor does otherwise than eager, and the backend as Inductor does."""

    @property
    def replayed(self) -> float:
        """The share of replays."""
        return self.replays / max(1, self.replays + self.fallbacks)


def run_programs(seeds: Sequence[int], device: str, *, generate: bool, sequences: int) -> Tally:
    """Compare sequences of calls of several programs.

    Args:
        generate: let Inductor generate kernels. Otherwise torch's own operators do all work. What is captured, kept
            and replayed is found in the same way, and compiling takes a fraction of the time.

    Raises:
        AssertionError: the backend differs from eager where plain Inductor does not, or from both; for each such
            program the message has its source and its calls.
    """
    replays = fallbacks = like_inductor = 0
    failures = []
    for seed in seeds:
        try:
            for part in _run_program(seed, device, generate, sequences):
                replays += part.num_replays
                fallbacks += sum(part.fallbacks.values())
        except AssertionError as error:
            if (difference := _difference_of_inductor(seed, device, generate, sequences, str(error))) is None:
                like_inductor += 1
            else:
                failures.append(f"{error}\n{difference}")
    assert not failures, f"{len(failures)} of {len(seeds)} programs failed\n" + "\n\n".join(failures[:4])
    return Tally(replays=replays, fallbacks=fallbacks, like_inductor=like_inductor)


def _difference_of_inductor(seed: int, device: str, generate: bool, sequences: int, failure: str) -> str | None:
    """How plain Inductor and the backend differ in a program that failed; None if they do the same."""
    try:
        _run_program(seed, device, generate, sequences, sides=("eager", "inductor"))
    except AssertionError as error:
        if str(error).splitlines()[0] == failure.splitlines()[0] and "Tensor-likes are not close" not in failure:
            return None  # both raise the same
    else:
        return "Inductor without this backend does as eager does"
    try:
        _run_program(seed, device, generate, sequences, sides=("inductor", "backend"))
    except AssertionError as error:
        return f"Inductor without this backend does otherwise than both: {str(error).splitlines()[0]}"
    return None


def _run_program(
    seed: int, device: str, generate: bool, sequences: int, *, sides: tuple[str, str] = ("eager", "backend")
) -> Sequence[Any]:
    """Compare sequences of calls of one program; return what the report tells of the backend."""
    with fresh_compiler(), inductor_config.patch(compile_threads=1):
        function = _compare(seed, device, generate, sequences, sides)
        return parts(function) if sides[1] == "backend" else []


def _compare(seed: int, device: str, generate: bool, sequences: int, names: tuple[str, str]) -> Any:
    """Compare as two sides do; return the second side's function."""
    program = Program.random(seed)
    variety = Variety.random(seed, program)
    torch.manual_seed(seed)
    module = module_of(program, variety.dtype).to(device)
    modules = [module, copy.deepcopy(module)]
    calls = [_side(name, one, variety, device, generate) for name, one in zip(names, modules, strict=True)]
    start = copy.deepcopy(module.state_dict())
    for number in range(sequences):
        for one in modules:
            one.zero_grad()
            one.load_state_dict(start)
        sides = [Side(call=call, module=one) for call, one in zip(calls, modules, strict=True)]
        sequence = CallSequence(seed * 1000 + number, program, variety, sides, device)
        try:
            with (
                dynamo_config.patch(recompile_limit=64),
                functorch_config.patch(donated_buffer=variety.donated),
                contextlib.nullcontext() if generate else _torch_operators(),
                shared_from(num_bytes=1, packed_from=1) if variety.shares else contextlib.nullcontext(),
            ):
                sequence.run(CALLS)
        except Exception as error:
            raise AssertionError(_failure(error, seed, device, generate, number, sequence)) from error
    return calls[1]


def _side(name: str, module: RandomModule, variety: Variety, device: str, generate: bool) -> Any:
    options = {"fallback_random": True, "fallback_by_default": not generate}
    if name == "inductor":
        return torch.compile(module, dynamic=variety.dynamic, options=options)
    if name == "backend":
        return compiled(module, device, dynamic=variety.dynamic, **options, **dict(variety.options))
    return module


def _failure(error: Exception, seed: int, device: str, generate: bool, number: int, sequence: CallSequence) -> str:
    folder, test = "cpu" if device == "cpu" else "gpu", "generated" if generate else "operators"
    command = f"python -m pytest -n 0 tests/{folder}/test_backend_differential.py -k {test}"
    lines = [
        f"seed {seed}, sequence {number}, call {len(sequence.made)}: {type(error).__name__}: {error}",
        f"GRAPHCAP_RANDOM_FIRST={seed} GRAPHCAP_RANDOM_PROGRAMS=1 {command}",
        sequence.program.source,
        *(str(line) for line in (sequence.variety, *sequence.made)),
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _torch_operators() -> Iterator[None]:
    """Have Inductor compile calls of torch's own operators only, which takes a fraction of the time.

    ``fallback_by_default`` alone would call those that make views, too, of which Inductor then does not know what they
    are views of: it moves work on the whole tensor past a write to its part.
    """
    from torch._inductor import graph

    fall_back: Callable[[torch.fx.Node], bool] = graph.should_fallback_by_default
    graph.should_fallback_by_default = lambda node: fall_back(node) and not _makes_view(node.target)
    try:
        yield
    finally:
        graph.should_fallback_by_default = fall_back


def _makes_view(target: Any) -> bool:
    if target in (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default):
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and not schema.is_mutable and any(result.alias_info for result in schema.returns)
