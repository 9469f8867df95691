"""Chrome traces as text, event by event: never a whole trace in memory, nothing rewritten unasked.

The standard library's decoder finds where each event ends; what nobody changes is copied as it
was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TextIO

_CHUNK: Final = 1 << 20
_LARGEST_VALUE: Final = 64 << 20
"""Characters. A single value larger than this is no event but a file that isn't JSON."""
_SPACE: Final = " \t\r\n"
# Kineto copies names as they are; some hold control characters.
_DECODER: Final = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class Plain:
    """Text between events: the head and tail of the trace, commas, white space."""

    text: str


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of ``traceEvents``."""

    number: int
    """Position in the file."""
    text: str
    """As it is written there."""
    value: Any


@dataclass(frozen=True, slots=True)
class EndOfEvents:
    """Where more events can be put, right behind the last one."""

    num_events: int


Piece = Plain | Event | EndOfEvents


def pieces(file: TextIO, name: str) -> Iterator[Piece]:
    """The whole of a trace in pieces; their texts put together are the file.

    Args:
        name: the file's, for errors.

    Raises:
        ValueError: it is no JSON object with a list ``traceEvents``, or it is cut off.
    """
    return _Reader(file, name).pieces()


class _Reader:
    """A window on the file; ``_at`` is the first character not yet given out."""

    def __init__(self, file: TextIO, name: str) -> None:
        self._file = file
        self._name = name
        self._window = ""
        self._at = 0
        self._gone = 0

    def pieces(self) -> Iterator[Piece]:
        yield Plain(self._take_space() + self._take("{"))
        yield Plain(self._take_space())
        found = False
        if self._peek() == "}":
            self._fail("a list traceEvents")
        while True:
            key, text = self._value()
            yield Plain(text + self._take_space() + self._take(":") + self._take_space())
            if key == "traceEvents" and not found:
                found = True
                yield from self._events()
            else:
                yield Plain(self._value()[1])
            yield Plain(self._take_space())
            if self._peek() != ",":
                break
            yield Plain(self._take(",") + self._take_space())
        yield Plain(self._take("}") + self._take_space())
        if self._peek():
            self._fail("nothing more")
        if not found:
            self._fail("a list traceEvents")

    def _events(self) -> Iterator[Piece]:
        yield Plain(self._take("[") + self._take_space())
        number = 0
        if self._peek() != "]":
            while True:
                value, text = self._value()
                yield Event(number, text, value)
                number += 1
                space = self._take_space()
                if self._peek() != ",":
                    break
                yield Plain(space + self._take(",") + self._take_space())
        else:
            space = ""
        yield EndOfEvents(number)
        yield Plain(space + self._take("]"))

    def _value(self) -> tuple[Any, str]:
        while True:
            try:
                value, end = _DECODER.raw_decode(self._window, self._at)
            except json.JSONDecodeError as error:
                if not self._more():
                    raise self._error(f"JSON ({error.msg})") from error
                continue
            # A number at the end of the window may go on behind it.
            if end < len(self._window) or not self._more():
                text = self._window[self._at : end]
                self._at = end
                return value, text

    def _peek(self) -> str:
        """The next character; empty at the end of the file."""
        if self._at >= len(self._window) and not self._more():
            return ""
        return self._window[self._at]

    def _take(self, expected: str) -> str:
        if self._peek() != expected:
            self._fail(repr(expected))
        self._at += 1
        return expected

    def _take_space(self) -> str:
        taken = []
        while self._peek() and self._window[self._at] in _SPACE:
            taken.append(self._window[self._at])
            self._at += 1
        return "".join(taken)

    def _more(self) -> bool:
        if len(self._window) - self._at > _LARGEST_VALUE:
            self._fail(f"an event, found {_LARGEST_VALUE >> 20} MB that are none")
        try:
            chunk = self._file.read(_CHUNK)
        except (EOFError, OSError, UnicodeDecodeError) as error:
            raise self._error(f"more of the file ({error})") from error
        if not chunk:
            return False
        self._gone += self._at
        self._window = self._window[self._at :] + chunk
        self._at = 0
        return True

    def _fail(self, expected: str) -> NoReturn:
        raise self._error(expected)

    def _error(self, expected: str) -> ValueError:
        found = repr(self._window[self._at : self._at + 20]) if self._at < len(self._window) else "the end of the file"
        return ValueError(
            f"{self._name} is no Chrome trace as torch.profiler exports it, or it is cut off: at character "
            f"{self._gone + self._at} expected {expected}, found {found}"
        )
