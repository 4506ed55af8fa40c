"""The CUDA source compiles without a GPU, into registers that fit and no spills; the cubin cache survives what disks do."""

import importlib.util
import json
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from kernels import nvrtc
from kernels.mla_paged_decode_cuda import ARCH, SOURCE, THREADS, choose_variant
from kernels.nvrtc import CompileError, compile_cubin

pytest.importorskip("cuda.bindings", reason="NVRTC comes with the Linux x86-64 packages cuda-bindings and nvidia-cuda-nvrtc")

KERNEL = "mla_paged_decode"
TRITON = importlib.util.find_spec("triton")
DISASSEMBLER = Path(TRITON.origin if TRITON else "").parent / "backends" / "nvidia" / "bin" / "cuobjdump"
REGISTERS_AN_SM = 65536
SHARED_BYTES_AN_SM = 227 * 1024
SMALL = 'extern "C" __global__ void twice(float *x) { x[threadIdx.x] *= FACTOR; }'


def all_variants():
    """Every variant that some call on an H100 or H200 gets."""
    shapes = [
        dict(batch=batch, head_groups=groups, tokens=tokens, sm_count=132, fp16=fp16, paged=paged)
        for batch in (1, 16, 32, 33, 64, 65, 128, 129)
        for groups in (1, 8)
        for tokens in (1_000, 20_000, 20_001, 2**21)
        for fp16 in (False, True)
        for paged in (False, True)
    ]
    return sorted({choose_variant(**shape) for shape in shapes}, key=repr)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "small.cu"
    path.write_text(SMALL)
    return path


def refuse_to_compile(monkeypatch):
    def compile_again(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "_compile", compile_again)


@pytest.mark.parametrize("variant", all_variants(), ids=lambda v: "-".join(map(str, v.defines().values())))
def test_variant_fits_an_sm_without_spills(variant):
    cubin = compile_cubin(SOURCE, KERNEL, ARCH, variant.defines())
    assert (cubin.spill_bytes, cubin.stack_bytes, cubin.static_shared_bytes) == (0, 0, 0)
    assert 0 < cubin.registers * THREADS * variant.ctas_per_sm <= REGISTERS_AN_SM
    assert (variant.shared_bytes() + 1024) * variant.ctas_per_sm <= SHARED_BYTES_AN_SM + 1024
    assert cubin.code.startswith(b"\x7fELF")


def disassembly(code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([DISASSEMBLER, "-sass", file.name], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="the disassembler comes with the package triton")
@pytest.mark.parametrize("variant", all_variants(), ids=lambda v: "-".join(map(str, v.defines().values())))
def test_no_copy_is_assembled_to_an_illegal_instruction(variant):
    """NVRTC 13.0 does so where the shared address of a copy with a cache policy is kept in two registers, one of them uniform.

    The registers of a 64-bit descriptor begin at an even number; those of the illegal instructions do not.
    """
    copies = re.findall(r"LDGSTS.*?desc\[UR(\d+)\]", disassembly(compile_cubin(SOURCE, KERNEL, ARCH, variant.defines()).code))
    assert len(copies) > 10
    assert [register for register in copies if int(register) % 2] == []


def test_figures_of_host_and_source_are_compared():
    variant = choose_variant(batch=1, head_groups=1, tokens=100, sm_count=132, fp16=False, paged=False)
    with pytest.raises(CompileError, match="mla_paged_decode_cuda.py has other figures"):
        compile_cubin(SOURCE, KERNEL, ARCH, variant.defines() | {"MLA_SLOT_BYTES": 1})


@pytest.mark.parametrize(
    "shape, expected",
    [
        (dict(batch=1, tokens=1_008), (3, 1, False, 0)),
        (dict(batch=16, tokens=20_000), (3, 1, False, 1)),
        (dict(batch=16, tokens=20_001), (2, 2, False, 1)),
        (dict(batch=32, tokens=20_001), (2, 2, False, 1)),
        (dict(batch=33, tokens=20_001), (2, 2, False, 2)),
        (dict(batch=67, tokens=1_000), (2, 2, False, 4)),
        (dict(batch=128, tokens=50_000), (2, 2, False, 4)),
        (dict(batch=129, tokens=50_000), (2, 2, True, 0)),
        (dict(batch=2, tokens=2**21), (2, 2, True, 0)),
        (dict(batch=1, tokens=2**21), (2, 2, False, 0)),
        (dict(batch=17, tokens=5_000, head_groups=8), (2, 2, True, 0)),
    ],
)
def test_variant_follows_the_shape(shape, expected):
    variant = choose_variant(**({"head_groups": 1, "sm_count": 132, "fp16": False, "paged": False} | shape))
    assert (variant.stages, variant.ctas_per_sm, variant.flat, variant.per_lane) == expected


def test_second_compilation_is_read_from_disk(cache, source, monkeypatch):
    first = compile_cubin(source, "twice", ARCH, {"FACTOR": 2})
    refuse_to_compile(monkeypatch)
    assert compile_cubin(source, "twice", ARCH, {"FACTOR": 2}) == first
    assert first.registers > 0 and first.arch == ARCH


@pytest.mark.parametrize("change", ["source", "arch", "define"])
def test_whatever_decides_the_code_decides_the_entry(cache, source, monkeypatch, change):
    compile_cubin(source, "twice", ARCH, {"FACTOR": 2})
    refuse_to_compile(monkeypatch)
    if change == "source":
        source.write_text(SMALL + "\n")
    with pytest.raises(AssertionError, match="compiled again"):
        compile_cubin(source, "twice", "sm_100a" if change == "arch" else ARCH, {"FACTOR": 3 if change == "define" else 2})


@pytest.mark.parametrize("damage", ["cut code", "cut facts", "other layout"])
def test_damaged_entry_is_compiled_again(cache, source, damage):
    first = compile_cubin(source, "twice", ARCH, {"FACTOR": 2})
    (facts,) = cache.rglob("facts.json")
    code = facts.with_name("kernel.cubin")
    if damage == "cut code":
        code.write_bytes(code.read_bytes()[:100])
    elif damage == "cut facts":
        facts.write_text(facts.read_text()[:10])
    else:
        facts.write_text(json.dumps({"sha256": "0"}))
    assert compile_cubin(source, "twice", ARCH, {"FACTOR": 2}) == first
    assert code.read_bytes() == first.code


def test_cache_that_cannot_be_written_costs_only_time(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_cubin(source, "twice", ARCH, {"FACTOR": 2}).registers > 0


def test_error_shows_the_compilers_words(cache, source):
    source.write_text('extern "C" __global__ void twice() { undeclared(); }')
    with pytest.raises(CompileError, match=r'(?s)small\.cu does not compile for sm_90a.*"undeclared" is undefined'):
        compile_cubin(source, "twice", ARCH)
    assert not list(Path(cache).rglob("*.cubin"))


def test_unknown_architecture_is_named(cache, source):
    with pytest.raises(CompileError, match="sm_1"):
        compile_cubin(source, "twice", "sm_1", {"FACTOR": 2})
