"""Measuring: sides in turns in one process, the median of many, quartiles as the spread."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

LEAST_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Median and quartiles of some samples."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    num_samples: int


def summarize(samples: Sequence[float]) -> Summary:
    """Median and quartiles.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("there are no samples to summarize; expected at least one")
    if len(samples) == 1:
        return Summary(median=samples[0], low=samples[0], high=samples[0], num_samples=1)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Summary(median=median, low=low, high=high, num_samples=len(samples))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round, so that drift of the machine, which both sides see, drops out."""
    if len(ours) != len(theirs):
        raise ValueError(f"both sides need the same number of rounds, found {len(ours)} and {len(theirs)}")
    return [one / other for one, other in zip(ours, theirs, strict=True)]


@contextlib.contextmanager
def garbage_collection_off() -> Iterator[None]:
    """No collection inside, so that one side does not pay for the garbage of another."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def alternate(sides: Mapping[str, Callable[[], float]], *, rounds: int, seconds: float) -> dict[str, list[float]]:
    """One sample of each side per round, each round beginning with another side.

    Ends early after ``seconds``, but not before ``LEAST_ROUNDS``.
    """
    names = list(sides)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with garbage_collection_off():
        end = time.perf_counter() + seconds
        for number in range(rounds):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                samples[name].append(sides[name]())
            if number + 1 >= LEAST_ROUNDS and time.perf_counter() > end:
                break
    return samples


# A loop runs the measured call so many times. Which loop it is says what the caller does with results.
Loop = Callable[[int], None]


def dropping(call: Callable[[], object]) -> Loop:
    """``f(x)``: the result is gone before the next call."""

    def loop(number: int) -> None:
        for _ in range(number):
            call()

    return loop


def holding(call: Callable[[], object]) -> Loop:
    """``y = f(x)``: the last result lives while the next call runs."""

    def loop(number: int) -> None:
        for _ in range(number):
            y = call()  # noqa: F841 - held until the next one is there

    return loop


def host_dropping(call: Callable[[], object], synchronize: Callable[[], None], number: int) -> float:
    """Microseconds until a call returns, the device idle before it; results dropped. Median of ``number``."""
    for _ in range(3):  # the side before has left its own things in the caches
        call()
    times = []
    for _ in range(number):
        synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    synchronize()
    return statistics.median(times) * 1e6


def host_holding(call: Callable[[], object], synchronize: Callable[[], None], number: int) -> float:
    """The same while the last result is held."""
    for _ in range(3):
        y = call()
    times = []
    for _ in range(number):
        synchronize()
        start = time.perf_counter()
        y = call()  # noqa: F841 - held until the next one is there
        times.append(time.perf_counter() - start)
    synchronize()
    return statistics.median(times) * 1e6


def end_to_end(loop: Loop, synchronize: Callable[[], None], number: int) -> float:
    """Microseconds per call, calls back to back, until the device is done with the last."""
    loop(3)
    synchronize()
    start = time.perf_counter()
    loop(number)
    synchronize()
    return (time.perf_counter() - start) / number * 1e6


def launching(loop: Loop, synchronize: Callable[[], None], number: int) -> float:
    """Microseconds of host time per call, calls back to back, without waiting for the device."""
    loop(3)
    synchronize()
    start = time.perf_counter()
    loop(number)
    spent = time.perf_counter() - start
    synchronize()
    return spent / number * 1e6


def number_for(loop: Loop, synchronize: Callable[[], None], *, seconds: float) -> int:
    """How many calls take about ``seconds`` end to end: 10 to 500."""
    return max(10, min(500, int(seconds * 1e6 / end_to_end(loop, synchronize, 10))))
