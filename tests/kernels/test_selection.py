"""What `--kernel` and `--workloads` may name."""

import sys

import pytest

from kernels.foreign import Interrupted
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


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize("before", ["", "family:", "1,"])
def test_a_number_of_any_length_is_one_short_line(before, digits):
    with pytest.raises(SelectionError) as error:
        select_workloads(before + "9" * digits)
    assert "..." in str(error.value) and len(str(error.value)) < 400


def test_leading_zeros_are_nothing():
    assert [workload.index for workload in select_workloads("007,00")] == [0, 7]


def test_feedback_is_what_authors_see():
    batches = {workload.batch for workload in select_workloads("feedback")}
    assert len(select_workloads("feedback")) == 8 and batches == {1, 16, 64}


@pytest.mark.parametrize("spec", ["", ",", "47", "-1", "1;2", "family:", "family:9", "feedback,1", "1,,2", "1,", "1e1", "٣", "one"])
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


LATIN = "# -*- coding: latin-1 -*-\nNAME = 'm\xe4'\ndef decode(a): ...\n".encode("latin-1")


@pytest.mark.parametrize(
    "source, message",
    [
        (LATIN, "defines no function 'run'; it defines decode"),
        (b"NAME = 'm\xe4'\n", "cannot be imported: SyntaxError"),
        (b"raise BaseException('no\\nsecond line')\n", "cannot be imported: BaseException: no$"),
        (b"raise KeyboardInterrupt\n", "cannot be imported: KeyboardInterrupt$"),
        (b"import sys; sys.exit()\n", "cannot be imported: SystemExit$"),
        (
            b"class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n",
            "cannot be imported: E: its text cannot be read",
        ),
        (b"def __getattr__(name): raise RuntimeError(name)\n", "raised when asked for 'run': RuntimeError: run$"),
        (b"def __getattr__(name): return 3\n", "defines no function 'run'; it defines __getattr__"),
        (
            b"class D:\n    def __repr__(self): raise ValueError\ndef run(q=D()): ...\n",
            "has signature that cannot be shown, wanted the positional",
        ),
    ],
)
def test_a_strange_file_is_one_clear_line(tmp_path, source, message):
    (tmp_path / "k.py").write_bytes(source)
    with pytest.raises(KernelError, match=message) as error:
        load_kernel(f"{tmp_path / 'k.py'}:run")
    assert "\n" not in str(error.value)


def test_a_file_that_throws_out_modules_leaves_them_to_others(tmp_path):
    before = dict(sys.modules)
    (tmp_path / "k.py").write_text("import sys\nsys.modules.clear()\ndef run(*arguments): ...\n")
    assert callable(load_kernel(f"{tmp_path / 'k.py'}:run").call)
    assert {name: module for name, module in sys.modules.items() if name in before} == before


def test_ctrl_c_while_a_file_is_imported_is_not_the_files(tmp_path):
    (tmp_path / "k.py").write_text("from kernels.foreign import Interrupted\nraise Interrupted\n")
    with pytest.raises(Interrupted):
        load_kernel(f"{tmp_path / 'k.py'}:run")


@pytest.mark.parametrize("spec", [f"{'x' * 5000}.py:f", f"{'x/' * 3000}k.py:f", "y" * 5000])
def test_a_spec_that_is_too_long_is_not_repeated_at_length(spec):
    with pytest.raises(KernelError, match="File name too long|neither a kernel") as error:
        load_kernel(spec)
    assert len(str(error.value)) < 300


def test_the_shipped_kernels_load_and_their_hashes_differ():
    kernel = load_kernel("mla_paged_decode")
    assert kernel.shipped and kernel.call.__name__ == "mla_paged_decode"
    assert shipped_sha256("mla_paged_decode") == kernel.sha256 != shipped_sha256("mla_paged_decode_triton")
