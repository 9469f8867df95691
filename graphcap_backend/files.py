"""Files that are there in whole or not at all; gzip by name."""

from __future__ import annotations

import errno
import gzip
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

_LEVEL = 6  # gzip.open takes 9: twice as slow, hardly smaller


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """A text file to write to; it takes the place of ``path`` when the block ends without an error.

    A name that ends in ".gz" is compressed, the same text to the same bytes.

    Raises:
        OSError: it can't be written.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".graphcap-")
    except OSError as error:  # which names the temporary file
        raise OSError(error.errno, error.strerror, os.fspath(target.parent)) from None
    temporary = Path(name)
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(os.fdopen(handle, "wb"))
            if is_gzip(target):
                packed = gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0)
                buffered = io.BufferedWriter(stack.enter_context(packed), 1 << 20)
                text: TextIO = stack.enter_context(io.TextIOWrapper(buffered, encoding="utf-8", newline="\n"))
            else:
                text = stack.enter_context(io.TextIOWrapper(raw, encoding="utf-8", newline="\n"))
            yield text
        temporary.chmod(_usual_mode(target))
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def refuse_to_overwrite(source: str | os.PathLike[str], target: str | os.PathLike[str], output: str) -> None:
    """Raise where ``output``, to be written to ``target``, would take the place of what it is made from.

    Raises:
        ValueError: they are the same file.
    """
    if Path(target).exists() and Path(source).exists() and Path(source).samefile(target):
        raise ValueError(f"{os.fspath(target)} is the saved capture itself; name another file for the {output}")


def opened_text(path: str | os.PathLike[str]) -> TextIO:
    """``path`` for reading, unpacked where its name ends in ".gz". The caller closes it."""
    if is_gzip(path):
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8")
    return Path(path).open(encoding="utf-8")


def is_gzip(path: str | os.PathLike[str]) -> bool:
    """Whether the name says so."""
    return os.fspath(path).endswith(".gz")


def _usual_mode(target: Path) -> int:
    """What a plain open() would give; a temporary file is readable by its owner only."""
    if target.exists():
        return target.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
