"""The plan by pieces of the CUDA kernel, its own source run on the CPU: every token of random batches in exactly one CTA."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.mla_paged_decode_cuda import SOURCE

HARNESS = Path(__file__).with_name("plan_on_host.cpp")
FIRST, PAST = "// ceil(n / d) for 0 <= n < 2^21", "// Equal token counts a CTA"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the plan for the CPU")


def build(folder: Path, per_lane: int, plan: str) -> Path:
    (folder / "plan.inc").write_text(plan)
    program = folder / "plan"
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-pthread", f"-DMLA_PER_LANE={per_lane}", f'-DPLAN_SOURCE="{folder}/plan.inc"']
    subprocess.run(["g++", *flags, str(HARNESS), "-o", str(program)], check=True)
    return program


def plan_source() -> str:
    text = SOURCE.read_text()
    return text[text.index(FIRST) : text.index(PAST)]


def faults(program: Path, seed: int, trials: int) -> int:
    return int(subprocess.run([program, str(seed), str(trials)], check=True, capture_output=True, text=True, timeout=300).stdout)


@pytest.mark.parametrize("per_lane", [1, 2, 4])
def test_every_token_has_one_cta(tmp_path, per_lane):
    assert faults(build(tmp_path, per_lane, plan_source()), seed=per_lane, trials=12) == 0


def test_harness_sees_a_plan_that_loses_tokens(tmp_path):
    rounded_down = plan_source().replace("(d - 0.5f)", "(d - 1.5f)")
    assert rounded_down != plan_source()
    assert faults(build(tmp_path, 2, rounded_down), seed=1, trials=6) > 0
