"""A candidate's source as text: edits, identity, and the techniques that can be seen in it."""

import ast
import difflib
import re
import warnings

from evoteam.memory import sha256


class EditError(ValueError):
    """An edit that fits nowhere, or in several places; the message shows what is near."""


def apply_edit(source: str, search: str, replace: str) -> str:
    """`source` with the one place that reads `search` replaced."""
    count = source.count(search)
    if count == 1:
        return source.replace(search, replace)
    if count:
        raise EditError(f"the search text stands {count} times in the source; take in more lines around it")
    raise EditError(f"the search text is not in the source. The nearest lines are:\n{_nearest(source, search)}")


def _nearest(source: str, search: str) -> str:
    lines = [line[:200] for line in source.splitlines()]
    wanted = next((line[:200] for line in search.splitlines() if line.strip()), "")
    found = difflib.get_close_matches(wanted, lines, n=1, cutoff=0)
    if not found:
        return "(none)"
    start = max(0, lines.index(found[0]) - 2)
    shown = lines[start : start + min(20, 4 + search.count("\n"))]
    return "\n".join(f"{start + i + 1:4d}  {line}" for i, line in enumerate(shown))


def program_sha256(source: str) -> str:
    """Hash of the program without comments, layout and docstrings; of the text where it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and len(body) > 1 and _is_docstring(body[0]):
                del body[0]
        return sha256(ast.dump(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return sha256(source)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def confirmed(techniques: list[str], patterns: dict[str, str], source: str) -> tuple[list[str], list[str]]:
    """Of the declared tags that the task knows: those that its patterns find in the source, and those they do not."""
    known = [tag for tag in dict.fromkeys(techniques) if tag in patterns]
    seen = [tag for tag in known if re.search(patterns[tag], source)]
    return seen, [tag for tag in known if tag not in seen]
