"""What `--kernel` and `--workloads` may name."""

import pytest

from kernels.selection import KernelError, SelectionError, load_kernel, select_workloads, shipped_sha256


@pytest.mark.parametrize(
    "spec, indices",
    [
        ("all", list(range(47))),
        ("family:6", [31, 32, 33, 34, 35, 42, 44, 45]),
        ("family:3,5", [19, 20, 27, 30]),
        ("9, 1,5", [1, 5, 9]),
        ("46", [46]),
        ("1,1", [1]),
    ],
)
def test_choices_of_workloads(spec, indices):
    assert [workload.index for workload in select_workloads(spec)] == indices


def test_feedback_is_what_authors_see():
    batches = {workload.batch for workload in select_workloads("feedback")}
    assert len(select_workloads("feedback")) == 8 and batches == {1, 16, 64}


@pytest.mark.parametrize("spec", ["", ",", "47", "-1", "1;2", "family:", "family:9", "feedback,1", "1e1", "٣", "one"])
def test_what_is_not_there_is_refused_with_the_range(spec):
    with pytest.raises(SelectionError, match=r"wanted all, feedback, family:K, or numbers of 0\.\.46"):
        select_workloads(spec)


def test_a_users_kernel_is_loaded_and_hashed(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import helper\n"
        "def run(q_nope, q_pe, ckv, kpe, kv_indptr, kv_indices, sm_scale, *, out=None, lse=None): return helper.N\n"
    )
    (tmp_path / "helper.py").write_text("N = 5\n")
    kernel = load_kernel(f"{path}:run")
    assert kernel.call(*range(7)) == 5 and not kernel.shipped and len(kernel.sha256) == 64
    path.write_text(path.read_text() + "# changed\n")
    assert load_kernel(f"{path}:run").sha256 != kernel.sha256


def test_a_kernel_with_any_positional_arguments_is_taken(tmp_path):
    (tmp_path / "k.py").write_text("def run(*arguments): return arguments\n")
    assert load_kernel(f"{tmp_path / 'k.py'}:run").call(1) == (1,)


@pytest.mark.parametrize(
    "text", ["def run(a, b, c, d, e, f): ...", "def run(a, b, c, d, e, f, g, h): ...", "def run(*, q_nope): ..."]
)
def test_another_signature_is_refused(tmp_path, text):
    (tmp_path / "k.py").write_text(text)
    with pytest.raises(KernelError, match="wanted the positional arguments q_nope, q_pe, ckv_cache"):
        load_kernel(f"{tmp_path / 'k.py'}:run")


def test_a_folder_is_no_kernel(tmp_path):
    (tmp_path / "k.py").mkdir()
    with pytest.raises(KernelError, match="does not exist or is not a file"):
        load_kernel(f"{tmp_path / 'k.py'}:run")


def test_the_shipped_kernels_load_and_their_hashes_differ():
    kernel = load_kernel("mla_paged_decode")
    assert kernel.shipped and kernel.call.__name__ == "mla_paged_decode"
    assert shipped_sha256("mla_paged_decode") == kernel.sha256 != shipped_sha256("mla_paged_decode_triton")
