"""Reads the published page tables from a checkout of the FlashInfer-Trace data set."""

import json
import math
from pathlib import Path

import numpy as np

from kernels.foreign import describe, one_line
from kernels.workloads import FACTS, NUM_PAGES, load_workloads

DEFINITION = FACTS["source"]["definition"]
_DTYPES = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}


class TraceError(ValueError):
    """The folder is not a usable FlashInfer-Trace checkout; the message names the file and what is wrong with it."""


def load_page_tables(folder: str | Path) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """{workload index: (kv_indptr int32 [B + 1], kv_indices int32 [N])} of all 47 workloads.

    Every table is checked against the known lengths and the number of pages. Raises TraceError.
    """
    root = Path(folder)
    listing = _find_listing(root)
    entries = {}
    for number, line in enumerate(_read(listing).decode("utf-8", "replace").splitlines(), 1):
        if line.strip():
            try:
                entry = json.loads(line)["workload"]
                entries[entry["uuid"]] = entry["inputs"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise TraceError(f"{listing}:{number} is not a workload record ({describe(error)})") from None
    return {workload.index: _page_table(root, listing, workload, entries) for workload in load_workloads()}


def _find_listing(root: Path) -> Path:
    try:
        is_folder = root.is_dir()
        found = sorted((root / "workloads").rglob(f"{DEFINITION}.jsonl")) if is_folder else []
    except OSError as error:
        raise TraceError(f"cannot read {one_line(str(root), 100)}: {error.strerror}") from None
    if not is_folder:
        raise TraceError(f"{root} is not a folder; pass the root of a FlashInfer-Trace checkout")
    if not found:
        raise TraceError(
            f"{root} holds no workloads/**/{DEFINITION}.jsonl; pass the root of a FlashInfer-Trace checkout"
        )
    return found[0]


def _page_table(root: Path, listing: Path, workload, entries: dict) -> tuple[np.ndarray, np.ndarray]:
    if workload.uuid not in entries:
        raise TraceError(f"{listing} has no workload {workload.uuid} (index {workload.index})")
    parts = []
    for name in ("kv_indptr", "kv_indices"):
        try:
            path, key = (root / entries[workload.uuid][name]["path"]), entries[workload.uuid][name]["tensor_key"]
        except (KeyError, TypeError):
            raise TraceError(f"{listing}: workload {workload.uuid} has no stored {name}") from None
        parts.append(_read_tensor(path, key))
    kv_indptr, kv_indices = parts
    if kv_indptr.size != workload.batch + 1 or kv_indptr[0] != 0 or tuple(np.diff(kv_indptr).tolist()) != workload.lens:
        raise TraceError(f"{path}: kv_indptr has other lengths than workload {workload.uuid} is known to have")
    if kv_indices.size != workload.tokens or kv_indices.min() < 0 or kv_indices.max() >= NUM_PAGES:
        raise TraceError(f"{path}: kv_indices must be {workload.tokens} pages in 0..{NUM_PAGES - 1}")
    return kv_indptr.astype(np.int32), kv_indices.astype(np.int32)


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TraceError(f"{one_line(str(path))} cannot be read: {why}") from None
    if content.startswith(b"version https://git-lfs"):
        raise TraceError(f"{path} is a Git LFS pointer: run `git lfs pull` in the checkout")
    return content


def _read_tensor(path: Path, key: str) -> np.ndarray:
    """One integer tensor of a safetensors file: 8 bytes header length, JSON header, data."""
    content = _read(path)
    try:
        start = 8 + int.from_bytes(content[:8], "little")
        entry = json.loads(content[8:start])[key]
        first, last = entry["data_offsets"]
        shape, dtype = entry["shape"], _DTYPES[entry["dtype"]]
        data = content[start + first : start + last]
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(data)} bytes of data for {entry['dtype']} {shape}")
        return np.frombuffer(data, dtype)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(f"{path} holds no integer tensor {key!r} ({describe(error)})") from None
