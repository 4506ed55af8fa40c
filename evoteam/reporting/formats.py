"""How numbers are written, on the terminal and on the page."""

import math
from typing import Any

MISSING = "-"
WIDE = "wide: the samples spread by more than 10% in each of three tries"


def number(value: float | None, spec: str = ",.2f", unit: str = "") -> str:
    """`value` by a format spec, or a dash where there is none."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:{spec}}{unit}"


def status(row_status: str) -> str:
    """A row's status in the reader's words; `unstable` is a verdict, so a row whose samples spread is `wide`."""
    return {"unstable": "wide"}.get(row_status, row_status)


def sentence(text: str) -> str:
    """`text` with a capital at its beginning, all other letters as they are, and one full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def finite(data: Any) -> Any:
    """A copy of JSON-like data with None for NaN and infinities, which JSON cannot hold."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data
