"""Reads and checks expected_results.json: the claims, the paper, its sources and the caveats."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evoteam.reporting.claims import FIGURES, MODES, SCOPES, Claim
from kernels.foreign import one_line

REQUIRED = ("id", "mode", "title", "value", "unit", "judge", "scope", "conditions", "sources")
CHOICES = {"mode": MODES, "scope": SCOPES, "judge": ("ratio", "range", "shown")}


class ClaimsError(ValueError):
    """expected_results.json cannot be used; the message names the place and what is wanted there."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The whole file: the claims with the paper, its sources and the caveats that hold for all of them."""

    claims: tuple[Claim, ...]
    paper: dict
    sources: dict
    caveats: tuple[str, ...]


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _text_or_nothing(value: object) -> bool:
    return value is None or isinstance(value, str)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("id", "title", "unit", "conditions"), (_text, "a text")),
    **dict.fromkeys(("task", "arm", "baseline", "reported"), (_text_or_nothing, "a text")),
    "hardware": (lambda value: value is None or _text(value), "a text or null"),
    "tolerance": (lambda value: _number(value) and value >= 0, "a number >= 0"),
    "workloads": (_count, "a count"),
    "runs": (lambda value: value is None or _count(value), "a count or null"),
    "sources": (lambda value: _texts(value) and len(value) > 0, 'a list of names under "sources"'),
    "caveats": (_texts, "a list of texts"),
}


def load(path: Path) -> Expected:
    """Read and check `expected_results.json`. Raises ClaimsError with every fault found, not only the first."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClaimsError(f"cannot read {path}: {error.strerror}; it lies beside repro.py in a checkout") from error
    except (ValueError, RecursionError) as error:
        raise ClaimsError(f"{path} is not JSON: {error}; restore it with `git checkout {path.name}`") from error
    if not isinstance(data, dict) or data.get("schema") != 1 or not isinstance(data.get("claims"), list):
        raise ClaimsError(f'{path}: wanted an object with "schema": 1 and a list "claims"')
    faults: list[str] = []
    paper, sources, caveats = data.get("paper"), data.get("sources"), data.get("caveats")
    if not isinstance(paper, dict) or not all(_text(paper.get(key)) for key in ("title", "group", "read")):
        faults.append("paper must be an object with the texts title, group and read")
    if not isinstance(sources, dict) or not all(map(_is_source, sources.values())):
        faults.append("sources must be an object of objects with the texts what and read, and address (a text or null)")
        sources = {}
    if not _texts(caveats):
        faults.append("caveats must be a list of texts")
    claims = [_claim(row, f"claims[{i}]", sources, faults) for i, row in enumerate(data["claims"])]
    ids = Counter(claim.id for claim in claims if claim)
    faults += [f'id "{name}" is used {count} times' for name, count in ids.items() if count > 1]
    if not claims:
        faults.append("claims is empty")
    if faults:
        raise ClaimsError(f"{path}: " + "; ".join(faults))
    return Expected(tuple(claims), paper, sources, tuple(caveats))


def _is_source(source: object) -> bool:
    texts = isinstance(source, dict) and _text(source.get("what")) and _text(source.get("read"))
    return texts and _text_or_nothing(source.get("address"))


def _claim(row: object, place: str, sources: dict, faults: list[str]) -> Claim | None:
    if not isinstance(row, dict):
        faults.append(f"{place} is {type(row).__name__}, wanted an object")
        return None
    place = f'{place} ("{_shown(row.get("id"))}")'
    found = [f"{place} has unknown field {one_line(key, 80)}" for key in row if key not in Claim.__dataclass_fields__]
    found += [f"{place} lacks {key}" for key in REQUIRED if key not in row]

    def fault(key: str, wanted: str) -> None:
        found.append(f"{place}: {key} is {_shown(row.get(key), repr)}, wanted {wanted}")

    if not found:
        for key, allowed in CHOICES.items():
            if row[key] not in allowed:
                fault(key, f"one of {', '.join(allowed)}")
        for key, (right, wanted) in KINDS.items():
            if key in row and not right(row[key]):
                fault(key, wanted)
        value = row["value"]
        pair = isinstance(value, list) and len(value) == 2 and all(map(_number, value)) and value[0] <= value[1]
        if not (pair if row["judge"] == "range" else _number(value)):
            fault("value", "[low, high]" if row["judge"] == "range" else "a number")
        if row["judge"] != "shown" and row.get("figure") not in FIGURES:
            fault("figure", f"one of {', '.join(FIGURES)}")
        if _texts(row["sources"]):
            found += [
                f"{place}: source {name!r} is not listed under sources"
                for name in row["sources"]
                if name not in sources
            ]
    faults += found
    if found:
        return None
    return Claim(**{key: tuple(item) if isinstance(item, list) else item for key, item in row.items()})


def _shown(value: object, show: Callable[[object], str] = str) -> str:
    return one_line(show(value), 80)
