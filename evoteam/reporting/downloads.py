"""What a reader can save from a page: data addresses, which need neither a server nor a script."""

import base64
import csv
import io
from collections.abc import Iterable, Sequence


def samples_csv(record: dict) -> str:
    """Every raw sample of a scope: workload, kernel, sample number, microseconds."""
    lines = [
        (row["index"], kernel, i, us)
        for row in record["rows"]
        for kernel, samples in row.get("samples", {}).items()
        for i, us in enumerate(samples)
    ]
    return to_csv(("workload", "kernel", "sample", "us"), lines)


def to_csv(columns: Sequence[str], rows: Iterable[Sequence]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def download(kind: str, text: str) -> str:
    """A data: address that a browser saves as a file, without a server or a script."""
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"
