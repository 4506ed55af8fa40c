"""The 47 workloads' published facts, and that generated page tables have the structure of the real ones."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kernels.workloads import FEEDBACK, NUM_PAGES, SM_SCALE, load_workloads, page_table, random_workloads

SEED = 5


def rows_of(table, request):
    kv_indptr, kv_indices = table
    return kv_indices[kv_indptr[request] : kv_indptr[request + 1]]


def strides(table):
    """How often neighboring tokens of a request lie how many pages apart."""
    return Counter(d for b in range(len(table[0]) - 1) for d in np.diff(rows_of(table, b)).tolist())


def sharing(table):
    """Multiset of (requests that have a page in common), over pages that several requests have."""
    owners = {}
    for b in range(len(table[0]) - 1):
        for page in rows_of(table, b).tolist():
            owners.setdefault(page, []).append(b)
    return Counter(tuple(requests) for requests in owners.values() if len(requests) > 1)


def test_published_facts():
    workloads = load_workloads()
    assert [w.index for w in workloads] == list(range(47))
    assert len({w.uuid for w in workloads}) == 47
    assert Counter(w.batch for w in workloads) == {1: 15, 16: 16, 64: 16}
    assert Counter(w.family for w in workloads) == dict(enumerate((15, 3, 4, 3, 5, 1, 8, 5, 3)))
    assert (min(w.tokens for w in workloads), max(w.tokens for w in workloads)) == (8, 75_145)
    assert sum(w.tokens for w in workloads) == 815_452
    assert workloads[41].uuid == "5bef8d88-0f74-4ccb-a256-b02842951df3"
    assert max(workloads[41].lens) == 9_197
    assert SM_SCALE == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2, rel=1e-7)
    assert set(FEEDBACK) <= set(range(47)) and {workloads[i].batch for i in FEEDBACK} == {1, 16, 64}


def test_totals_in_the_data_agree_with_the_lengths():
    from kernels.workloads import FACTS

    workloads = load_workloads()
    for family in FACTS["families"]:
        assert len(family["base_lens"]) == family["batch_size"]
        for snapshot in family["snapshots"]:
            workload = workloads[snapshot["index"]]
            assert workload.tokens == snapshot["total_kv"]
            assert workload.duplicate_page_refs == snapshot["duplicate_page_refs"]
            assert workload.decoded < min(workload.lens)


@pytest.mark.parametrize("index", range(47))
def test_page_table_shape_range_and_sharing(index):
    workload = load_workloads()[index]
    table = kv_indptr, kv_indices = page_table(workload, SEED)
    assert kv_indptr.dtype == kv_indices.dtype == np.int32
    assert tuple(np.diff(kv_indptr).tolist()) == workload.lens
    assert kv_indices.min() == 1 and kv_indices.max() < NUM_PAGES
    assert (kv_indices[kv_indptr[:-1]] == 1).all()
    assert kv_indices.size - np.unique(kv_indices).size == workload.duplicate_page_refs
    assert sharing(table) == Counter({requests: tokens for requests, tokens in workload.shared})
    if not workload.fragmented and workload.batch > 1:
        for request in range(workload.batch):
            assert (np.diff(rows_of(table, request)[-workload.decoded :]) == workload.batch).all()
        assert strides(table)[1] > 0.9 * (workload.tokens - workload.batch * (workload.decoded + 6))


def test_same_seed_same_table_and_other_seed_another():
    for index in (0, 14, 27, 46):
        workload = load_workloads()[index]
        first, again, other = page_table(workload, 1), page_table(workload, 1), page_table(workload, 2)
        assert (first[1] == again[1]).all()
        assert (first[0] == other[0]).all()
        assert index == 0 or (first[1] != other[1]).any()


@pytest.mark.parametrize("family", range(1, 9))
def test_later_workloads_of_a_family_extend_the_earlier_ones(family):
    members = sorted((w for w in load_workloads() if w.family == family), key=lambda w: w.steps)
    tables = [page_table(w, SEED) for w in members]
    for earlier, later in zip(tables, tables[1:]):
        for request in range(members[0].batch):
            before = rows_of(earlier, request)
            assert (rows_of(later, request)[: before.size] == before).all()


@pytest.mark.parametrize("seed", range(20))
def test_no_seed_hands_a_page_out_twice(seed):
    for workload in (load_workloads()[41], load_workloads()[14], *random_workloads(seed)[2:4]):
        kv_indices = page_table(workload, seed)[1]
        shared = workload.duplicate_page_refs or (workload.batch - 1 if workload.fragmented else 0)
        assert kv_indices.size - np.unique(kv_indices).size == shared
        assert kv_indices.max() < NUM_PAGES


def test_family_8_decodes_in_long_strides():
    table = page_table(load_workloads()[41], SEED)
    counts = strides(table)
    for stride in (512, 1024, 2048):
        assert counts[stride] > 3_000
    assert counts[256] > 100 and counts[2] > 3_000
    assert counts[64] == 0


def test_random_workloads_are_other_shapes_within_their_bounds():
    workloads = random_workloads(seed=3)
    assert len(workloads) == 40
    assert workloads == random_workloads(seed=3) != random_workloads(seed=4)
    assert max(w.batch for w in workloads) > 128 and min(w.batch for w in workloads) < 4
    assert max(max(w.lens) for w in workloads) > 16_000
    for workload in workloads:
        assert 1 <= workload.batch <= 256 and workload.tokens <= 262_144
        assert min(workload.lens) >= 1 and max(workload.lens) <= 32_768
        kv_indptr, kv_indices = page_table(workload, SEED)
        assert kv_indices.size == workload.tokens == kv_indptr[-1]
        assert 0 < kv_indices.min() and kv_indices.max() < NUM_PAGES


REAL = Path(os.environ.get("MLA_PAGE_TABLES", "mla_page_tables.npz"))


@pytest.mark.skipif(not REAL.is_file(), reason="set MLA_PAGE_TABLES to an .npz with ip0..ip46 and ix0..ix46")
def test_structure_of_the_published_page_tables():
    real = np.load(REAL)
    for workload in load_workloads():
        published = real[f"ip{workload.index}"], real[f"ix{workload.index}"]
        generated = page_table(workload, SEED)
        assert (generated[0] == published[0]).all()
        assert sharing(generated) == sharing(published), workload.index
        ours, theirs = strides(generated), strides(published)
        if not workload.fragmented:
            for stride in {1, workload.batch}:
                assert abs(ours[stride] - theirs[stride]) <= 3 * workload.batch, (workload.index, stride)
        elif workload.batch > 1:
            for stride in (1, 2, 512, 1024, 2048):
                assert abs(ours[stride] - theirs[stride]) <= 0.25 * theirs[stride] + 64, (workload.index, stride)
