"""Rows as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.measure import Summary
from benchmarks.rows import Row

_HEADER = ("row", "figure", "quartiles", "bar", "aim", "reached")
_RIGHT = (1, 2, 3, 4)


def render(rows: Sequence[Row]) -> str:
    """A table: one line per row with its figure, below it what the sides took and what was noted."""
    cells = [_cells(row) for row in rows]
    widths = [max(len(line[column]) for line in (_HEADER, *cells)) for column in range(len(_HEADER))]
    lines = [_line(_HEADER, widths), "  ".join("-" * width for width in widths)]
    for row, line in zip(rows, cells, strict=True):
        lines.append(_line(line, widths))
        lines.extend(f"    {text}" for text in _details(row))
    return "\n".join(lines)


def verdict(rows: Iterable[Row]) -> str:
    """One line: how many bars are kept."""
    rows = list(rows)
    judged = [row for row in rows if row.reached is not None]
    missed = [row.name for row in judged if row.reached == "no"]
    failed = [row.name for row in rows if row.status == "failed"]
    skipped = [row.name for row in rows if row.status == "skipped"]
    parts = [f"{len(judged) - len(missed)} of {len(judged)} bars kept"]
    for label, names in (("missed", missed), ("failed", failed), ("skipped", skipped)):
        if names:
            parts.append(f"{label}: {', '.join(names)}")
    return "; ".join(parts)


def number(value: float) -> str:
    """Four significant digits, three below 0.1, never an exponent."""
    size = abs(value)
    if size == 0 or size < 1e-6:
        return "0"
    digits = 3 - math.floor(math.log10(size)) if size >= 0.1 else 2 - math.floor(math.log10(size))
    return f"{value:.{max(0, min(digits, 3 if size >= 0.1 else 6))}f}"


def _cells(row: Row) -> tuple[str, ...]:
    if row.status != "measured":
        return (row.name, "-", "-", _bound(row, "bar"), _bound(row, "aim"), row.status)
    figure = row.figure
    return (
        row.name,
        f"{number(figure.median)} {row.figure_unit}" if figure else "-",
        _quartiles(figure) if figure else "-",
        _bound(row, "bar"),
        _bound(row, "aim"),
        row.reached or "-",
    )


def _bound(row: Row, which: str) -> str:
    value = getattr(row.target, which) if row.target is not None else None
    return "-" if value is None else f"{value:.2f}"


def _quartiles(summary: Summary) -> str:
    return f"{number(summary.low)}..{number(summary.high)}"


def _details(row: Row) -> Iterator[str]:
    if row.sides:
        sides = (f"{name} {number(side.median)} ({_quartiles(side)})" for name, side in row.sides.items())
        yield f"{row.what} [{row.unit}]: {', '.join(sides)}"
    else:
        yield row.what
    if row.note:
        yield row.note


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if column in _RIGHT else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()
