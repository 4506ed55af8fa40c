"""The checks of mla_paged_decode, and the portable kernel in Triton's interpreter, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mla_inputs import paged_inputs

from kernels.mla_paged_decode import MLAInputError, implementation, mla_paged_decode
from kernels.mla_paged_decode_triton import mla_paged_decode_triton

HERE = Path(__file__).parent
NAMES = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "kv_indptr", "kv_indices", "sm_scale")


def test_in_the_interpreter():
    """A process of its own, as Triton decides at import whether it compiles or interprets."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / "interpreted_mla_paged_decode.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^\d\d passed\b(?!.*skipped)", run.stdout, re.MULTILINE), run.stdout


def call(changes=None, *, decode=mla_paged_decode, keywords=None, **options):
    """Call with well-formed inputs of two requests, some of them changed: {name: function of the good one}."""
    arguments, kv_lens = paged_inputs([5, 3], **options)
    named = dict(zip(NAMES, arguments))
    for name, change in (changes or {}).items():
        named[name] = change(named[name])
    return decode(*named.values(), **{"kv_lens": kv_lens, **(keywords or {})})


def misaligned(tensor):
    """The same values and strides, 8 bytes further."""
    flat = torch.empty(tensor.numel() + 4, dtype=tensor.dtype)[4:]
    return flat.view(tensor.shape).copy_(tensor)


def padded_rows(tensor, width):
    """The same values in rows of `width` elements."""
    wide = torch.zeros(*tensor.shape[:-1], width, dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


MISUSE = [
    # types
    ({"q_nope": lambda t: t.float().numpy()}, "q_nope is a ndarray; wanted a torch.Tensor"),
    ({"q_nope": lambda t: None}, "q_nope is a NoneType; wanted a torch.Tensor"),
    ({"kv_indptr": lambda t: t.tolist()}, "kv_indptr is a list; wanted a torch.Tensor"),
    ({"sm_scale": lambda s: torch.tensor(s)}, "sm_scale is a Tensor; wanted a Python float"),
    ({"sm_scale": lambda s: "large"}, "sm_scale is 'large'; wanted a Python float"),
    ({"sm_scale": lambda s: float("nan")}, "sm_scale is nan; wanted a finite number"),
    ({"sm_scale": lambda s: 10**400}, "sm_scale is 1000000000000000000000000000000000000000; wanted a Python float"),
    # dtypes
    ({"q_nope": torch.Tensor.float}, "q_nope is torch.float32; wanted torch.bfloat16 or torch.float16"),
    ({"q_pe": torch.Tensor.half}, "q_pe is torch.float16; wanted torch.bfloat16, as q_nope"),
    ({"ckv_cache": torch.Tensor.float}, "ckv_cache is torch.float32; wanted torch.bfloat16, as q_nope"),
    ({"kpe_cache": torch.Tensor.half}, "kpe_cache is torch.float16; wanted torch.bfloat16, as q_nope"),
    ({"kv_indptr": torch.Tensor.long}, "kv_indptr is torch.int64; wanted torch.int32"),
    ({"kv_indices": torch.Tensor.long}, "kv_indices is torch.int64; wanted torch.int32"),
    # devices
    ({"q_pe": lambda t: t.to("meta")}, "q_pe is on meta, q_nope on cpu; move them to one device"),
    ({"kv_indices": lambda t: t.to("meta")}, "kv_indices is on meta, q_nope on cpu"),
    # shapes
    ({"q_nope": lambda t: t[0]}, "q_nope has shape [16, 512]; wanted [B, H, 512] with H in 8, 16, 32, 64, 128"),
    ({"q_nope": lambda t: t[:, :12]}, "q_nope has shape [2, 12, 512]; wanted [B, H, 512]"),
    ({"q_nope": lambda t: t[..., :256]}, "q_nope has shape [2, 16, 256]; wanted [B, H, 512]"),
    ({"q_pe": lambda t: t[:1]}, "q_pe has shape [1, 16, 64]; wanted [2, 16, 64]"),
    ({"ckv_cache": lambda t: t[:, 0]}, "wanted [P, page_size, 512] with page_size in 1, 16, 32, 64. Add the page"),
    ({"ckv_cache": lambda t: t.expand(-1, 3, -1)}, "3, 512]; wanted [P, page_size, 512] with page_size in"),
    ({"kpe_cache": lambda t: t[:-1]}, "kpe_cache has shape"),
    ({"kv_indptr": lambda t: t[:-1]}, "kv_indptr has shape [2]; wanted [3]: [B + 1]"),
    ({"kv_indices": lambda t: t[None]}, "kv_indices has shape [1, 13]; wanted [N]"),
    # strides
    ({"q_nope": lambda t: t.mT.contiguous().mT}, "q_nope has strides (8192, 1, 16); wanted 1 in the last dimension"),
    ({"ckv_cache": lambda t: padded_rows(t, 514)}, "ckv_cache has strides (514, 514, 1); wanted multiples of 8"),
    ({"q_pe": lambda t: padded_rows(t, 68)}, "q_pe has strides (1088, 68, 1); wanted multiples of 8 elements"),
    (
        {
            "ckv_cache": lambda t: t.as_strided((1, *t.shape[1:]), (2**31, *t.stride()[1:])),
            "kpe_cache": lambda t: t[:1],
        },
        "ckv_cache has strides (2147483648, 512, 1); wanted less than 2147483648 elements",
    ),
    ({"kv_indices": lambda t: t.repeat(2)[::2]}, "kv_indices has strides (2,); wanted a contiguous tensor"),
    ({"kv_indptr": lambda t: t.repeat(2)[::2]}, "kv_indptr has strides (2,); wanted a contiguous tensor"),
    # addresses
    ({"q_nope": misaligned}, "q_nope starts 8 bytes past a multiple of 16 bytes; wanted 0. Start the"),
    ({"kpe_cache": misaligned}, "kpe_cache starts 8 bytes past a multiple of 16 bytes"),
    # gradients
    ({"q_nope": lambda t: t.requires_grad_()}, "an input requires grad, and decode has no backward"),
]  # fmt: skip


@pytest.mark.parametrize("decode", [mla_paged_decode, mla_paged_decode_triton])
@pytest.mark.parametrize(("changes", "message"), MISUSE, ids=[message[:40] for _, message in MISUSE])
def test_misuse_of_inputs(changes, message, decode, monkeypatch):
    monkeypatch.setattr("kernels.mla_paged_decode_triton.require_device", lambda device: None)
    with pytest.raises(MLAInputError, match=re.escape(message)):
        call(changes, decode=decode)


def kept(**keywords):
    return keywords


MISUSE_OF_KEYWORDS = [
    (16, kept(kv_lens=None), "kv_lens is None and page_size is 16; wanted the tokens of each request, int32 [B]"),
    (16, kept(kv_lens=torch.tensor([5, 3])), "kv_lens is torch.int64; wanted torch.int32"),
    (16, kept(kv_lens=torch.tensor([5], dtype=torch.int32)), "kv_lens has shape [1]; wanted [2]: [B]"),
    (16, kept(kv_lens=[5, 3]), "kv_lens is a list; wanted a torch.Tensor"),
    (1, kept(out=torch.empty(2, 16, 512)), "out is torch.float32; wanted torch.bfloat16, as q_nope"),
    (1, kept(out=torch.empty(2, 8, 512, dtype=torch.bfloat16)), "out has shape [2, 8, 512]; wanted [2, 16, 512]"),
    (1, kept(out=torch.empty(2, 16, 576, dtype=torch.bfloat16)[..., :512]), "out has strides (9216, 576, 1); wanted a"),
    (1, kept(out=torch.empty(2 * 16 * 512 + 1, dtype=torch.bfloat16)[1:].view(2, 16, 512)), "out starts 2 bytes past"),
    (1, kept(lse=torch.empty(2, 16, dtype=torch.bfloat16)), "lse is torch.bfloat16; wanted torch.float32"),
    (1, kept(lse=torch.empty(2, 16, 1)), "lse has shape [2, 16, 1]; wanted [2, 16]: [B, H]"),
    (1, kept(lse=torch.empty(16, 2).T), "lse has strides (1, 2); wanted a contiguous tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("page_size", "keywords", "message"), MISUSE_OF_KEYWORDS)
def test_misuse_of_keywords(page_size, keywords, message):
    with pytest.raises(MLAInputError, match=re.escape(message)):
        call(page_size=page_size, keywords=keywords)


def test_out_must_not_be_the_query():
    arguments, _ = paged_inputs([5, 3])
    with pytest.raises(MLAInputError, match="out and q_nope share memory"):
        mla_paged_decode(*arguments, out=arguments[0])


def test_more_tokens_than_positions_have_bits_for(monkeypatch):
    monkeypatch.setattr("kernels.mla_paged_decode_arguments.MAX_TOKENS", 100)
    with pytest.raises(MLAInputError, match="kv_indices holds 7 pages of 16 tokens; wanted at most 100 tokens"):
        call(page_size=16)


def test_a_failed_call_is_not_remembered_as_checked():
    for _ in range(2):
        with pytest.raises(MLAInputError, match="q_pe has shape"):
            call({"q_pe": lambda t: t[:1]})


@pytest.mark.parametrize("decode", [mla_paged_decode, mla_paged_decode_triton])
def test_cpu_tensors_without_the_interpreter(decode):
    with pytest.raises(MLAInputError, match="the tensors are on cpu; wanted a GPU."):
        call(decode=decode)
    with pytest.raises(MLAInputError, match="the tensors are on cpu"):
        implementation("cpu")


def test_good_layouts_pass_the_checks(monkeypatch):
    """Every layout that the docstring names reaches the back end, with the outputs allocated as promised."""
    launched = []
    back_end = ("none", lambda *arguments: launched.append(arguments))
    monkeypatch.setattr("kernels.mla_paged_decode._back_end", lambda device: back_end)
    for options in (
        {},
        {"fused": True},
        {"page_size": 64, "fused": True},
        {"heads": 8},
        {"heads": 128, "dtype": torch.float16},
        {"first": 3, "tail": 0},
    ):
        out, lse = call(**options)
        heads, dtype = options.get("heads", 16), options.get("dtype", torch.bfloat16)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((2, heads, 512), dtype, True)
        assert (lse.shape, lse.dtype) == ((2, heads), torch.float32)
    call({"sm_scale": lambda s: 1, "kv_indices": lambda t: torch.cat([t[:1], t])[1:]})  # an int; 4-byte aligned indices
    call({"ckv_cache": lambda t: padded_rows(t, 520)})
    assert len(launched) == 8
    assert type(launched[6][6]) is float


def test_no_request_launches_nothing(monkeypatch):
    monkeypatch.setattr("kernels.mla_paged_decode._back_end", lambda device: ("none", None))
    arguments, _ = paged_inputs([])
    out, lse = mla_paged_decode(*arguments)
    assert out.shape == (0, 16, 512) and lse.shape == (0, 16)
