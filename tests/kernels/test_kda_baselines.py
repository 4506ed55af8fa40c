"""The baselines of KDA prefill where they are not installed, and the proof of which one ran."""

import pytest

from kernels import kda_baselines
from kernels.baselines import BaselineUnavailable
from kernels.kda_baselines import FLA, FLA_UNSAFE, FLASH_KDA, FLASH_KDA_BF16, NAMES, assert_backend, prepare

SAFE_KERNELS = ["l2norm_fwd_kernel", "chunk_kda_fwd_kernel_intra_sub_chunk", "chunk_kda_fwd_kernel_inter_solve_fused"]
PLAIN_KERNELS = [
    "l2norm_fwd_kernel",
    "chunk_kda_fwd_kernel_intra_token_parallel",
    "chunk_kda_fwd_kernel_inter_solve_fused",
]
FLASH_KERNELS = ["void _flash_kda_fwd_prepare<...>", "void _flash_kda_fwd_recurrence<...>"]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_baseline_says_what_to_install(name, monkeypatch):
    monkeypatch.setattr(kda_baselines, "find_spec", lambda module: None)
    with pytest.raises(
        BaselineUnavailable, match=f"{name} is not installed: pip install {kda_baselines.INSTALL[name]}"
    ):
        prepare(name, *[None] * 5, A_log=None, dt_bias=None, initial_state=None)
    assert kda_baselines.versions() == {}


def test_an_unknown_baseline():
    with pytest.raises(ValueError, match="there is no baseline 'fla2'; there are fla-safe-gate, fla, flash-kda"):
        prepare("fla2", *[None] * 5, A_log=None, dt_bias=None, initial_state=None)


@pytest.mark.parametrize(
    "name, own",
    [(FLA, SAFE_KERNELS), (FLA_UNSAFE, PLAIN_KERNELS), (FLASH_KDA, FLASH_KERNELS), (FLASH_KDA_BF16, FLASH_KERNELS)],
)
def test_what_ran_is_looked_at(name, own):
    assert_backend(name, own)
    for kernels in (SAFE_KERNELS, PLAIN_KERNELS, FLASH_KERNELS, SAFE_KERNELS + FLASH_KERNELS, []):
        if kernels is not own:
            with pytest.raises(
                RuntimeError, match=f"{name} ran other kernels than its own: {kernels[0] if kernels else 'none'}"
            ):
                assert_backend(name, kernels)
