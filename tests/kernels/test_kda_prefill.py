"""The checks and the schedule of kda_prefill, and the portable kernels in Triton's interpreter, in a process of its
own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.kda_inputs import KDAInputError
from kernels.kda_prefill import CHUNK, Schedule, choose_schedule, implementation, kda_prefill, kda_prefill_triton
from kernels.kda_regimes import kda_inputs

HERE = Path(__file__).parent


def test_in_the_interpreter():
    """A process of its own, as Triton decides at import whether it compiles or interprets."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / "interpreted_kda_prefill.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^\d\d passed in", run.stdout, re.MULTILINE), run.stdout


def call(changes, prefill=kda_prefill):
    """Call with well-formed inputs of two sequences, some of them changed: {name: function of the good one}."""
    arguments, keywords = kda_inputs([5, 3], heads=2)
    named = dict(zip(("q", "k", "v", "g", "beta"), arguments, strict=True)) | keywords
    for name, change in changes.items():
        named[name] = change(named.get(name))
    return prefill(**named)


MISUSE = [
    ({"q": lambda t: t.numpy()}, "q is a ndarray; wanted a torch.Tensor"),
    ({"A_log": lambda t: None}, "A_log is a NoneType; wanted a torch.Tensor"),
    ({"k": lambda t: t.to("meta")}, "k is on meta, q on cpu; move them to one device"),
    (
        {"q": lambda t: t.bfloat16()},
        "q is torch.bfloat16; wanted torch.float32: Triton's interpreter multiplies the bit patterns",
    ),
    ({"v": lambda t: t.half()}, r"v is torch.float16; wanted torch.float32. Convert it with .to\(torch.float32\)"),
    ({"dt_bias": lambda t: t.double()}, "dt_bias is torch.float64; wanted torch.float32"),
    ({"initial_state": lambda t: t.bfloat16()}, "initial_state is torch.bfloat16; wanted torch.float32"),
    ({"cu_seqlens": lambda t: t.float()}, "cu_seqlens is torch.float32; wanted torch.int64 or torch.int32"),
    ({"q": lambda t: t[..., :64]}, r"q has shape \[1, 8, 2, 64\]; wanted \[B, T, H, 128\]"),
    ({"k": lambda t: t[:, :7]}, r"k has shape \[1, 7, 2, 128\]; wanted \[1, 8, 2, 128\]: the shape of q"),
    ({"v": lambda t: t[:, :, :1]}, r"v has shape \[1, 8, 1, 128\]"),
    ({"beta": lambda t: t[..., None]}, r"beta has shape \[1, 8, 2, 1\]; wanted \[1, 8, 2\]: \[B, T, H\]"),
    ({"A_log": lambda t: t[:1]}, r"A_log has shape \[1\]; wanted \[2\]"),
    ({"dt_bias": lambda t: t[:128]}, r"dt_bias has shape \[128\]; wanted \[256\] or \[2, 128\]"),
    (
        {"initial_state": lambda t: t[:1]},
        r"initial_state has shape \[1, 2, 128, 128\]; wanted \[2, 2, 128, 128\]: \[N, H, V, K\]",
    ),
    ({"cu_seqlens": lambda t: t[None]}, r"cu_seqlens has shape \[1, 3\]; wanted \[N \+ 1\]"),
    ({"out": lambda t: torch.empty(1, 8, 2, 64)}, r"out has shape \[1, 8, 2, 64\]"),
    (
        {"g": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)},
        r"g has strides .*; wanted 1 in the last dimension",
    ),
    ({"initial_state": lambda t: t.transpose(2, 3)}, r"initial_state has strides .*; wanted a contiguous tensor"),
    ({"q": lambda t: t.requires_grad_()}, "an input requires grad, and this prefill has no backward"),
    ({"gate": lambda t: "sigmoid"}, "gate is 'sigmoid'; wanted one of 'safe', 'softplus'"),
    ({"lower_bound": lambda t: -5.5}, r"lower_bound is -5.5; wanted a number in \[-5, 0\)"),
    ({"lower_bound": lambda t: 0}, r"lower_bound is 0; wanted a number in \[-5, 0\)"),
    ({"lower_bound": lambda t: float("nan")}, "lower_bound is nan"),
    ({}, "q is on cpu; wanted a CUDA or ROCm device. With TRITON_INTERPRET=1 set before Python starts"),
]


@pytest.mark.parametrize("changes, message", MISUSE, ids=[message[:40] for _, message in MISUSE])
@pytest.mark.parametrize("prefill", [kda_prefill, kda_prefill_triton])
def test_bad_input_gets_one_clear_error(changes, message, prefill):
    with pytest.raises(KDAInputError, match=message):
        call(changes, prefill)


def test_sequences_side_by_side_are_one_batch_entry():
    arguments, keywords = kda_inputs([4], batch=2)
    with pytest.raises(KDAInputError, match="q has 2 batch entries and cu_seqlens is given; wanted one"):
        kda_prefill(*arguments, **(keywords | {"cu_seqlens": torch.tensor([0, 4])}))


@pytest.mark.parametrize(
    "sequences, heads, tokens, wanted",
    [
        (1, 96, 8192, Schedule(128, 8, 3)),  # heads alone fill the GPU: the state in one piece, every operand read once
        (8, 64, 8192, Schedule(128, 8, 3)),
        (1, 64, 8192, Schedule(64, 4, 3)),  # two programs a head fill it
        (1, 32, 8192, Schedule(64, 4, 3)),  # two segments would not pay
        (1, 12, 8192, Schedule(64, 4, 3, 26)),  # five segments
        (1, 12, 512, Schedule(64, 4, 3)),  # too short to cut
        (4, 4, 4 * 4096, Schedule(64, 4, 3, 16)),
    ],
)
def test_schedule_on_132_multiprocessors(sequences, heads, tokens, wanted):
    assert choose_schedule(target="sm_90", sms=132, sequences=sequences, heads=heads, tokens=tokens) == wanted


@pytest.mark.parametrize("target, sms", [("sm_90", 132), ("cuda", 148), ("hip", 256), ("cpu", 1)])
@pytest.mark.parametrize(
    "sequences, heads, tokens", [(1, 1, 1), (1, 1, 1 << 20), (300, 96, 300), (0, 8, 0), (1, 4, 65536)]
)
def test_schedules_make_sense(target, sms, sequences, heads, tokens):
    found = choose_schedule(target=target, sms=sms, sequences=sequences, heads=heads, tokens=tokens)
    assert found.block_v in (32, 64, 128) and found.stages >= 1
    if found.segment:
        programs = sequences * heads * 128 // found.block_v
        segments = -(-tokens // (sequences * CHUNK * found.segment))
        assert found.segment >= 8 and segments >= 3 and programs * segments <= sms


def test_implementation_here():
    assert implementation("cpu") == "triton"
