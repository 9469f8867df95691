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
from helpers.random_programs import Program, module_of
from helpers.random_sequences import CallSequence, Side
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

    @property
    def replayed(self) -> float:
        """The share of replays."""
        return self.replays / (self.replays + self.fallbacks)


def run_programs(seeds: Sequence[int], device: str, *, generate: bool, sequences: int) -> Tally:
    """Compare sequences of calls of several programs.

    Args:
        generate: let Inductor generate kernels. Otherwise torch's own operators do all work. What is captured, kept
            and replayed is found in the same way, and compiling takes a fraction of the time.

    Raises:
        AssertionError: the sides differ; for each such program the message has its source, its calls, and what plain
            Inductor does with them.
    """
    replays, fallbacks, failures = 0, 0, []
    for seed in seeds:
        with fresh_compiler(), inductor_config.patch(compile_threads=1):
            try:
                for part in parts(_run_program(seed, device, generate, sequences, plain=False)):
                    replays += part.num_replays
                    fallbacks += sum(part.fallbacks.values())
            except AssertionError as error:
                failures.append(f"{error}\n{_plain_inductor(seed, device, generate, sequences)}")
    assert not failures, f"{len(failures)} of {len(seeds)} programs failed\n" + "\n\n".join(failures[:4])
    return Tally(replays=replays, fallbacks=fallbacks)


def _run_program(seed: int, device: str, generate: bool, sequences: int, *, plain: bool) -> Any:
    """Compare sequences of calls of one program; return the compiled function for its report."""
    program = Program.random(seed)
    variety = Variety.random(seed, program)
    torch.manual_seed(seed)
    module = module_of(program, variety.dtype).to(device)
    twin = copy.deepcopy(module)
    options = {"fallback_random": True, "fallback_by_default": not generate}
    if plain:
        fast: Any = torch.compile(twin, dynamic=variety.dynamic, options=options)
    else:
        fast = compiled(twin, device, dynamic=variety.dynamic, **options, **dict(variety.options))
    start = copy.deepcopy(module.state_dict())
    for number in range(sequences):
        for one in (module, twin):
            one.zero_grad()
            one.load_state_dict(start)
        sides = [Side(call=module, module=module), Side(call=fast, module=twin)]
        sequence = CallSequence(seed * 1000 + number, program, variety, sides, device)
        try:
            with (
                dynamo_config.patch(recompile_limit=64),
                functorch_config.patch(donated_buffer=variety.donated),
                contextlib.nullcontext() if generate else _torch_operators(),
            ):
                sequence.run(CALLS)
        except Exception as error:
            raise AssertionError(_failure(error, seed, device, generate, number, sequence)) from error
    return fast


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


def _plain_inductor(seed: int, device: str, generate: bool, sequences: int) -> str:
    try:
        with fresh_compiler():
            _run_program(seed, device, generate, sequences, plain=True)
    except AssertionError as error:
        return f"Inductor without this backend: {str(error).splitlines()[0]}"
    return "Inductor without this backend does as eager does"


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
