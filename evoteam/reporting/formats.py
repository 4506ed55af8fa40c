"""How numbers are written, on the terminal and on the page."""

import math
from typing import Any

MISSING = "-"


def number(value: float | None, spec: str = ",.2f", unit: str = "") -> str:
    """`value` by a format spec, or a dash where there is none."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:{spec}}{unit}"


def finite(data: Any) -> Any:
    """A copy of JSON-like data with None for NaN and infinities, which JSON cannot hold."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data
