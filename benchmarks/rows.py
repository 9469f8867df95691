"""One row of the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.measure import Summary, ratios, summarize

Status = Literal["measured", "skipped", "failed"]
Reached = Literal["aim", "bar", "no"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Most that a figure may be: ``bar`` is what it must keep, ``aim`` what is hoped for."""

    bar: float
    aim: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement."""

    name: str
    what: str
    status: Status = "measured"
    unit: str = ""
    """Of the sides."""
    sides: dict[str, Summary] = field(default_factory=dict)
    figure: Summary | None = None
    """What the bar is about."""
    figure_unit: str = "x"
    target: Target | None = None
    note: str = ""

    @property
    def reached(self) -> Reached | None:
        """Which of its targets the median keeps; None without a target or a figure."""
        if self.target is None or self.figure is None:
            return None
        if self.target.aim is not None and self.figure.median <= self.target.aim:
            return "aim"
        return "bar" if self.figure.median <= self.target.bar else "no"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**dataclasses.asdict(self), "reached": self.reached}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """The inverse of ``to_json``."""
        known = {entry.name for entry in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        values["sides"] = {name: Summary(**side) for name, side in data["sides"].items()}
        values["figure"] = Summary(**data["figure"]) if data["figure"] else None
        values["target"] = Target(**data["target"]) if data["target"] else None
        return cls(**values)


def ratio_row(
    name: str,
    what: str,
    samples: Mapping[str, Sequence[float]],
    *,
    ours: str,
    theirs: str,
    unit: str,
    target: Target | None = None,
    note: str = "",
) -> Row:
    """A row whose figure is the median of ``ours`` over ``theirs``, round by round."""
    return Row(
        name=name,
        what=what,
        unit=unit,
        sides={side: summarize(values) for side, values in samples.items()},
        figure=summarize(ratios(samples[ours], samples[theirs])),
        target=target,
        note=note,
    )


def value_row(
    name: str,
    what: str,
    values: Sequence[float],
    *,
    unit: str,
    sides: Mapping[str, Sequence[float]] | None = None,
    target: Target | None = None,
    note: str = "",
) -> Row:
    """A row whose figure is a quantity of its own."""
    return Row(
        name=name,
        what=what,
        unit=unit,
        sides={side: summarize(samples) for side, samples in (sides or {}).items()},
        figure=summarize(values),
        figure_unit=unit,
        target=target,
        note=note,
    )
