"""Code of a user's own file: whatever it raises is its result, in one line, and only Ctrl-C gets past it."""

from collections.abc import Callable
from typing import Any

LONGEST = 300


class Interrupted(KeyboardInterrupt):
    """Ctrl-C of the person at the terminal; a kernel that raises KeyboardInterrupt itself raises another class."""


class Raised(Exception):
    """What foreign code raised, as one line."""


def call(function: Callable, *arguments: Any, **keywords: Any) -> Any:
    """`function(...)`; SystemExit, KeyboardInterrupt and everything else that it raises becomes Raised."""
    try:
        return function(*arguments, **keywords)
    except Interrupted:
        raise
    except BaseException as error:
        raise Raised(describe(error)) from error


def describe(error: BaseException) -> str:
    """`ValueError: text` in one line, also where the text cannot be had or is a page long."""
    try:
        text = str(error)
    except Interrupted:
        raise
    except BaseException:
        text = "its text cannot be read, __str__ raised"
    name = type.__getattribute__(type(error), "__name__")
    return one_line(f"{name}: {text}" if text.strip() else name)


def one_line(text: str, most: int = LONGEST) -> str:
    """The first line that says something, without control characters, cut to `most` characters."""
    line = next(filter(str.strip, text.splitlines()), "")
    shown = " ".join("".join(c if c.isprintable() else " " for c in line).split())
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."
