"""The CUDA prologue without a GPU: what the compiler says about it, and its own source run on the CPU, thread by
thread."""

import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernels import kda_prologue_cuda as cuda
from kernels.kda_reference import kda_reference, log_decay
from kernels.kda_regimes import error_ratio, kda_inputs
from kernels.nvrtc import CompileError, compile_cubin

EMULATOR = Path(__file__).with_name("emulated_kda_prologue.cpp")
CHUNK = 64


@pytest.mark.parametrize("safe", [1, 0])
def test_compiles_for_hopper_within_two_ctas_an_sm(safe):
    try:
        cubin = compile_cubin(cuda.SOURCE, cuda.KERNEL, cuda.ARCH, {"KDA_SAFE": safe})
    except CompileError as error:
        if "not available" in str(error):
            pytest.skip(str(error))
        raise
    assert cubin.registers <= 128 and cubin.static_shared_bytes == 0
    assert cubin.spill_bytes <= (128 if safe else 512)
    assert 2 * (cuda.SHARED_BYTES + 1024) <= 228 * 1024


def build(folder: Path, safe: int, *flags: str, source: Path = cuda.SOURCE) -> Path:
    """The emulator with the kernel in it, a program that is also a shared library."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    target = folder / f"prologue_{safe}"
    options = ["-std=c++20", "-O1", "-pthread", "-fno-strict-aliasing", "-w", *flags]
    macros = [f"-DKDA_SAFE={safe}", f'-DSOURCE="{source}"']
    built = subprocess.run(
        [compiler, *options, *macros, str(EMULATOR), "-o", str(target)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return target


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """`emulator(gate)` is the library for a gate."""

    @functools.cache
    def library(gate):
        folder = tmp_path_factory.mktemp("emulator")
        return ctypes.CDLL(str(build(folder, int(gate == "safe"), "-fPIC", "-shared")))

    return library


def run(library, arguments, keywords):
    """Operands that the emulated kernel writes, as `kda_prefill` would ask for them."""
    q = arguments[0]
    _, tokens, heads, dim = q.shape
    cu = keywords["cu_seqlens"]
    chunks = tokens // CHUNK + cu.numel() - 1
    shapes = [(CHUNK, dim)] * 3 + [(dim, CHUNK), (CHUNK, CHUNK)]
    operands = [torch.full((chunks, heads, *shape), torch.nan, dtype=torch.bfloat16) for shape in shapes]
    operands.append(torch.full((chunks, heads, dim), torch.nan))
    params = cuda.PARAMS.pack(
        *(t.data_ptr() for t in (*arguments, keywords["A_log"], keywords["dt_bias"], cu, *operands)),
        *(s for t in arguments for s in (0, *t.stride()[1:3])),
        dim**-0.5, -5.0, cu.numel() - 1, tokens, heads,
    )  # fmt: skip
    assert len(params) == library.facts(0)
    library.run(ctypes.create_string_buffer(params, len(params)), chunks * heads)
    return [operand.double() for operand in operands]


def recurrence(operands, starts, heads, initial):
    """Outputs and states from the operands in fp64: what the recurrence kernel computes."""
    w, qg, kg, ut, aqk, decay = operands
    outputs, states = [], initial.double().clone()
    for n, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        for i in range(-(-(end - start) // CHUNK)):
            c = start // CHUNK + n + i
            for h in range(heads):
                s = states[n, h]
                u = ut[c, h] - s @ w[c, h].T
                o = (s @ qg[c, h].T + u @ aqk[c, h].T).T
                outputs.append((start + CHUNK * i, end, h, o))
                states[n, h] = s * decay[c, h] + u @ kg[c, h]
    return outputs, states


@pytest.mark.parametrize(
    "regime, lengths, heads",
    [
        ("random", [1, 70, 0, 16], 2),
        ("saturated", [80], 1),
        ("checkpoint", [64], 1),
        ("softplus", [65, 0, 15], 2),
        ("steep softplus", [80], 1),
    ],
)
def test_emulated_kernel_is_right(emulator, regime, lengths, heads):
    arguments, keywords = kda_inputs(lengths, heads, regime=regime, dtype=torch.bfloat16)
    starts = keywords["cu_seqlens"].tolist()
    operands = run(emulator(keywords["gate"]), arguments, keywords)
    outputs, states = recurrence(operands, starts, heads, keywords["initial_state"])
    wanted, final = kda_reference(*arguments, **keywords)
    found = torch.full_like(wanted, torch.nan)
    for start, end, head, o in outputs:
        found[0, start : min(start + CHUNK, end), head] = o[: end - start]
    assert error_ratio(found, wanted) < 5e-3
    assert error_ratio(states, final) < 5e-3


@pytest.mark.parametrize("gate, regime", [("safe", "random"), ("softplus", "softplus")])
def test_emulated_decay_is_that_of_the_definition(emulator, gate, regime):
    arguments, keywords = kda_inputs([64], regime=regime, dtype=torch.bfloat16)
    decay = run(emulator(gate), arguments, keywords)[5]
    wanted = log_decay(arguments[3], keywords["A_log"], keywords["dt_bias"], gate, -5.0).sum(1).exp()
    torch.testing.assert_close(decay[0], wanted[0], rtol=1e-4, atol=1e-30)


def test_later_tokens_change_no_bit_of_earlier_operands(emulator):
    arguments, keywords = kda_inputs([64], dtype=torch.bfloat16)
    before = run(emulator("safe"), arguments, keywords)
    for tensor in arguments:
        tensor[:, 40:] = torch.randn_like(tensor[:, 40:])
    after = run(emulator("safe"), arguments, keywords)
    for name, (x, y) in enumerate(zip(before, after, strict=True)):
        if name in (
            0,
            1,
            4,
        ):  # w, qg and aqk, a row a token; ut has a column a token, kg and decay are of the whole chunk
            assert torch.equal(x[0, ..., :40, :], y[0, ..., :40, :])
    assert torch.equal(before[3][0, ..., :40], after[3][0, ..., :40])


def test_constants_here_are_those_of_the_source(emulator):
    assert [emulator("safe").facts(i) for i in range(3)] == [cuda.PARAMS.size, cuda.THREADS, cuda.SHARED_BYTES]


def races(folder: Path, safe: int, source: Path) -> str:
    """What ThreadSanitizer says about the kernel on a full and a partial chunk; empty when it has no complaint."""
    program = build(folder, safe, "-fsanitize=thread", source=source)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this Linux kernel")
    assert done.stdout == "done\n", done.stderr[:4000]
    return done.stderr


@pytest.mark.parametrize("safe", [1, 0])
def test_no_race_between_barriers(tmp_path, safe):
    assert races(tmp_path, safe, cuda.SOURCE) == ""


@pytest.mark.parametrize("number", range(4))
def test_without_one_of_its_barriers_there_is_a_race(tmp_path, number):
    source = cuda.SOURCE.read_text()
    starts = [match.start() for match in re.finditer(r"__syncthreads\(\);", source)]
    assert len(starts) == 4
    cut = tmp_path / "kda_prologue.cu"
    cut.write_text(source[: starts[number]] + source[starts[number] + len("__syncthreads();") :])
    assert "data race" in races(tmp_path, 1, cut)
