"""The check that needs no GPU: a right kernel passes, each kind of wrong one is named, a hanging one is ended."""

import time

import pytest

from kernels import nvrtc, selfcheck

NAMES = [
    "no-requests",
    "one-token",
    "no-tokens-at-all",
    "empty-requests-between",
    "around-tile-sizes",
    "one-long-among-short",
]
RIGHT = """
from kernels.reference import mla_paged_decode_reference
import torch

def right(*arguments):
    out, lse = mla_paged_decode_reference(*arguments)
    return out.to(torch.bfloat16), lse.float()

def zeros(*arguments):
    out, lse = right(*arguments)
    return torch.zeros_like(out), lse

def narrow(*arguments):
    out, lse = right(*arguments)
    return out, lse.to(torch.bfloat16)

def cut(*arguments):
    out, lse = right(*arguments)
    return out[:, :8], lse

def nothing(*arguments):
    return None

def raises(*arguments):
    raise ValueError("not today")

def leaves(*arguments):
    print("bye")
    raise SystemExit(3)

def ends(*arguments):
    import os
    os._exit(0)

def stops(*arguments):
    raise KeyboardInterrupt

class Speechless(BaseException):
    def __str__(self):
        raise ValueError

def speechless(*arguments):
    raise Speechless

def verbose(*arguments):
    raise ValueError("one\\ntwo")

def hangs(*arguments):
    while True:
        pass
"""


def check(tmp_path, function, **more):
    path = tmp_path / "mine.py"
    path.write_text(RIGHT)
    rows = selfcheck.interpret(f"{path}:{function}", lambda *_: None, **more)
    assert [row["name"] for row in rows] == NAMES
    return {row["name"]: row["reason"] for row in rows}


def test_a_right_kernel_is_right_everywhere(tmp_path):
    assert set(check(tmp_path, "right").values()) == {""}


@pytest.mark.parametrize(
    "function, reason",
    [
        ("zeros", "must be"),
        ("narrow", "lse is torch.bfloat16"),
        ("cut", "out is torch.bfloat16 [1, 8, 512]"),
        ("nothing", "returned NoneType, must return (out, lse)"),
        ("raises", "raised ValueError: not today"),
        ("leaves", "raised SystemExit: 3"),
        ("ends", "the process ended with status 0"),
        ("stops", "raised KeyboardInterrupt"),
        ("speechless", "raised Speechless: its text cannot be read, __str__ raised"),
        ("verbose", "raised ValueError: one"),
    ],
)
def test_a_wrong_kernel_is_told_why(tmp_path, function, reason):
    found = check(tmp_path, function)["one-token"]
    assert reason in found and "\n" not in found


def test_a_hanging_kernel_is_ended(tmp_path):
    start = time.monotonic()
    reasons = check(tmp_path, "hangs", timeout_s=8)
    assert set(reasons.values()) == {"not reached within 8 s"} and time.monotonic() - start < 40


def test_both_shipped_kernels_are_compiled_for_every_variant_in_use():
    seen = []
    rows = selfcheck.compile_all(lambda done, total, what: seen.append((done, total)))
    assert {row["kernel"] for row in rows} == {"mla_paged_decode.cu", "mla_paged_decode_triton.py"}
    assert [row for row in rows if not (row["registers"] > 0 and row["spill_bytes"] == 0)] == []
    assert all(48_000 < row["shared_bytes"] <= 232_448 for row in rows)
    assert seen[-1] == (len(rows), len(rows)) and len({row["variant"] for row in rows}) == len(rows)


def test_a_missing_compiler_is_said_in_its_rows(monkeypatch):
    def missing(*_):
        raise nvrtc.CompileError("NVRTC is not available\nmore")

    monkeypatch.setattr(nvrtc, "compile_cubin", missing)
    monkeypatch.setattr(selfcheck, "_triton_jobs", lambda workloads: [])
    rows = selfcheck.compile_all(lambda *_: None)
    assert {(row["variant"], row["registers"]) for row in rows} == {("NVRTC is not available", None)}
