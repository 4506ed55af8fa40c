"""Tasks: what an agent is told, what a candidate gets, and that listing them costs nothing."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import reference, tasks
from kernels.tasks import GARBAGE_INDEX, TASKS, TaskError, load_task
from kernels.workloads import NUM_PAGES, SM_SCALE, page_table

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def task():
    return load_task("mla-paged-decode")


def test_listing_and_reading_a_task_imports_no_gpu_library():
    code = (
        "import sys; from kernels.tasks import TASKS, load_task; t = load_task('mla-paged-decode'); "
        "assert t.definition and len(t.workloads) == 47 and len(TASKS) == 3; "
        "print(sorted({'torch', 'triton', 'flashinfer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_unknown_and_missing_tasks(monkeypatch):
    with pytest.raises(TaskError) as error:
        load_task("mla")
    assert (
        str(error.value) == "there is no task 'mla'; the tasks are mla-paged-decode, mla-paged-decode-cpu, kda-prefill"
    )
    monkeypatch.setitem(TASKS, "gone", tasks._elsewhere("kernels.gone"))
    with pytest.raises(TaskError) as error:
        load_task("gone")
    assert str(error.value) == "kernels/gone.py is not in this version"


def test_the_definition_states_what_the_task_does(task):
    assert f"Define `{task.entry_point}(" in task.definition
    for fact in (
        "[B, 16, 512]",
        "[B, 16, 64]",
        "[P, 1, 512]",
        f"{NUM_PAGES:,}",
        str(SM_SCALE),
        "75,145",
        "base 2",
        "1e-2",
        f"at most {reference.ERROR_RATIO_MARGIN} times FlashInfer's own",
    ):
        assert fact in task.definition, fact
    assert set(task.feedback) < {w.index for w in task.workloads}
    assert all(re.compile(pattern) for pattern in task.techniques.values())


def test_inputs_are_as_defined_and_pages_nobody_refers_to_hold_nan(task):
    workload = replace(task.workloads[27], num_pages=350_000)
    q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale = task.make_inputs(workload, 3, CPU)
    assert (q_nope.shape, q_pe.shape) == ((16, 16, 512), (16, 16, 64))
    assert (ckv_cache.shape, kpe_cache.shape) == ((350_000, 1, 512), (350_000, 1, 64))
    assert {t.dtype for t in (q_nope, q_pe, ckv_cache, kpe_cache)} == {torch.bfloat16}
    assert kv_indptr.dtype == kv_indices.dtype == torch.int32 and sm_scale == SM_SCALE
    assert kv_indices.numpy().tobytes() == page_table(workload, 3)[1].tobytes()
    used = torch.zeros(350_000, dtype=torch.bool).index_fill(0, kv_indices.long().unique(), True)
    for cache in (ckv_cache, kpe_cache):
        assert not cache[used].isnan().any()
        assert cache[~used].isnan().all()


def test_awkward_inputs_are_small_and_awkward(task):
    lens = [w.lens for w in task.awkward]
    assert () in lens and any(set(n) == {0} for n in lens) and any(0 in n and max(n) > 1 for n in lens)
    assert max(w.batch for w in task.awkward) >= 200 and max(w.tokens for w in task.awkward) < 10_000
    assert len({w.index for w in (*task.workloads, *task.awkward)}) == 47 + len(task.awkward)
    for workload in task.awkward:
        *_, kv_indptr, kv_indices, _ = task.make_inputs(workload, 0, CPU)
        assert kv_indices.numel() > kv_indptr[-1] == workload.tokens
        assert (kv_indices[workload.tokens :] == GARBAGE_INDEX).all()


def test_the_gate_passes_the_rounded_reference_and_nothing_cheap(task):
    workload = next(w for w in task.awkward if w.uuid == "awkward-empty-requests-between")
    reference = task.reference(task.make_inputs(workload, 1, CPU))
    assert reference[1][0].tolist() == [-math.inf] * 16
    right = reference[0].bfloat16(), reference[1].float()
    assert task.compare(right, reference).ok
    assert not task.compare((torch.zeros_like(right[0]), right[1]), reference).ok
    assert not task.compare((torch.full_like(right[0], math.nan), right[1]), reference).ok


def test_equal_seeds_give_equal_inputs(task):
    workload = task.awkward[2]
    first, again, other = (task.make_inputs(workload, seed, CPU) for seed in (4, 4, 5))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first[:6], again[:6]))
    assert not torch.equal(first[0], other[0])
