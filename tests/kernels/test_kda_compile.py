"""The portable KDA kernels as machine code for GPUs that are not here."""

import pytest

from kernels import kda_compile

MATRIX = {"sm_90a": ("HGMMA", "HMMA"), "sm_100a": ("UTC", "HMMA"), "gfx950": ("v_mfma",)}
SHARED_BYTES = {"sm_90a": 227 * 1024, "sm_100a": 227 * 1024, "gfx950": 160 * 1024}
KERNELS = ("prologue, safe gate", "prologue, softplus gate", "recurrence", "segment summary", "segment scan")


def test_every_kernel_is_listed_for_every_target():
    assert all(tuple(kda_compile.kernels(target)) == KERNELS for target in kda_compile.TARGETS)


# the softplus prologue takes ten seconds to compile, so one target stands for all
CASES = [(t, k) for t in kda_compile.TARGETS for k in KERNELS if t == "gfx950" or k != "prologue, softplus gate"]


@pytest.mark.parametrize("target, kernel", CASES)
def test_cross_compiles_to_matrix_instructions(target, kernel):
    machine = kda_compile.compile_kernel(target, kernel)
    assert machine.target == target and machine.code_bytes > 1000 and len(machine.sha256) == 64
    assert machine.matrix_instructions
    assert all(name.startswith(MATRIX[target]) for name in machine.matrix_instructions)
    assert 0 < machine.shared_bytes <= SHARED_BYTES[target]
    assert 0 < machine.registers <= (512 if target == "gfx950" else 255)
    if kernel != "prologue, softplus gate":  # its path for steep gates spills; the others must stay in registers
        assert machine.spilled <= 150


def test_hopper_runs_the_recurrence_on_warpgroups():
    """The state is the left operand and stays in registers: warpgroup instructions alone, and nothing spilled."""
    machine = kda_compile.compile_kernel("sm_90a", "recurrence")
    assert set(machine.matrix_instructions) == {"HGMMA"} and machine.spilled <= 10
