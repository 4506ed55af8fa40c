"""Reading a FlashInfer-Trace checkout: a good one gives its tables, a corrupt one gives one clear error."""

import json

import numpy as np
import pytest

from kernels.flashinfer_trace import DEFINITION, TraceError, load_page_tables
from kernels.workloads import load_workloads, page_table

FOLDER = f"workloads/mla_paged/{DEFINITION}.jsonl"


def write_tensors(path, **tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        kind = {"int32": "I32", "int64": "I64", "float32": "F32"}[str(tensor.dtype)]
        header[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + tensor.nbytes],
        }
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    root = tmp_path_factory.mktemp("trace")
    lines = []
    for workload in reversed(load_workloads()):
        kv_indptr, kv_indices = page_table(workload, seed=77)
        blob = f"./blob/workloads/mla_paged/{DEFINITION}/{workload.uuid}.safetensors"
        write_tensors(root / blob, kv_indices=kv_indices, kv_indptr=kv_indptr)
        stored = {
            name: {"type": "safetensors", "path": blob, "tensor_key": name} for name in ("kv_indptr", "kv_indices")
        }
        lines.append(
            json.dumps({"definition": DEFINITION, "workload": {"uuid": workload.uuid, "axes": {}, "inputs": stored}})
        )
    (root / FOLDER).parent.mkdir(parents=True)
    (root / FOLDER).write_text("\n".join(lines) + "\n")
    return root


def blob_of(root, index):
    return root / f"blob/workloads/mla_paged/{DEFINITION}/{load_workloads()[index].uuid}.safetensors"


@pytest.fixture
def changed(checkout):
    """`changed(path, content)` replaces a file for one test."""
    originals = {}

    def change(path, content):
        originals.setdefault(path, path.read_bytes())
        path.write_bytes(content)

    yield change
    for path, content in originals.items():
        path.write_bytes(content)


def test_a_good_checkout_gives_all_tables(checkout):
    tables = load_page_tables(checkout)
    assert sorted(tables) == list(range(47))
    for index in (0, 41):
        wanted = page_table(load_workloads()[index], seed=77)
        assert (tables[index][0] == wanted[0]).all() and (tables[index][1] == wanted[1]).all()
        assert tables[index][0].dtype == tables[index][1].dtype == np.int32


def test_not_a_checkout(tmp_path):
    with pytest.raises(TraceError, match="nowhere is not a folder; pass the root of a FlashInfer-Trace checkout"):
        load_page_tables(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=rf"holds no workloads/\*\*/{DEFINITION}.jsonl"):
        load_page_tables(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
            "is a Git LFS pointer: run `git lfs pull`",
        ),
        (b"", "holds no integer tensor 'kv_indptr'"),
        (b"\xff" * 64, "holds no integer tensor 'kv_indptr'"),
    ],
)
def test_a_corrupt_tensor_file(checkout, changed, content, message):
    changed(blob_of(checkout, 3), content)
    with pytest.raises(TraceError, match=message):
        load_page_tables(checkout)


def test_a_cut_off_tensor_file(checkout, changed):
    changed(blob_of(checkout, 3), blob_of(checkout, 3).read_bytes()[:-4])
    with pytest.raises(TraceError, match="bytes of data for I32"):
        load_page_tables(checkout)


def test_a_missing_tensor_file(checkout, tmp_path):
    blob = blob_of(checkout, 3)
    blob.rename(tmp_path / "away")
    try:
        with pytest.raises(TraceError, match="cannot be read: No such file"):
            load_page_tables(checkout)
    finally:
        (tmp_path / "away").rename(blob)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, x: (p, x.astype(np.float32)), "holds no integer tensor 'kv_indices'"),
        (lambda p, x: (p, x[:-1]), "kv_indices must be 208 pages in 0..989668"),
        (lambda p, x: (p, x + 989_669), "kv_indices must be 208 pages in 0..989668"),
        (lambda p, x: (p + 1, x), "has other lengths than workload deb5f26c-b29b-47f4-b5e6-bb70f89080e4"),
        (lambda p, x: (p[:-1], x), "has other lengths"),
    ],
)
def test_tables_that_do_not_fit_the_workload(checkout, changed, change, message):
    kv_indptr, kv_indices = change(*page_table(load_workloads()[2], seed=77))
    changed(blob_of(checkout, 2), b"")
    write_tensors(blob_of(checkout, 2), kv_indptr=kv_indptr, kv_indices=kv_indices)
    with pytest.raises(TraceError, match=message):
        load_page_tables(checkout)


def test_a_broken_listing(checkout, changed):
    listing = checkout / FOLDER
    lines = listing.read_bytes().splitlines()
    changed(listing, b"\n".join([*lines[:4], b'{"workload": 3}', *lines[4:]]))
    with pytest.raises(TraceError, match=r"jsonl:5 is not a workload record"):
        load_page_tables(checkout)
    changed(listing, b"\n".join(lines[:-1]))
    with pytest.raises(TraceError, match=r"has no workload 00cb2bc2-c7c7-43a1-b857-b516eb2ce061 \(index 0\)"):
        load_page_tables(checkout)
    changed(listing, b"\n".join([*lines[:-1], lines[-1].replace(b"kv_indices", b"other")]))
    with pytest.raises(TraceError, match="has no stored kv_indices"):
        load_page_tables(checkout)


def test_paths_that_no_system_takes(checkout, changed):
    with pytest.raises(TraceError, match="File name too long") as error:
        load_page_tables("x" * 5000)
    assert len(str(error.value)) < 200
    listing = checkout / FOLDER
    changed(listing, listing.read_bytes().replace(b'"path": "', b'"path": "\\u0000'))
    with pytest.raises(TraceError, match="cannot be read: embedded null byte"):
        load_page_tables(checkout)


def test_json_nested_too_deep(checkout, changed):
    changed(checkout / FOLDER, b"[" * 100_000)
    with pytest.raises(TraceError, match=r"jsonl:1 is not a workload record \(RecursionError"):
        load_page_tables(checkout)
