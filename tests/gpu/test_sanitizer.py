"""compute-sanitizer on small launches of every kernel that ships."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(TOOL is None, reason="needs compute-sanitizer, which the CUDA toolkit brings"),
]
ROOT = Path(__file__).parents[2]
KERNELS = ("mla_paged_decode", "mla_paged_decode_triton", "kda_prefill", "kda_prefill_triton")
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "initcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}


def sanitized(tool, kernel):
    """The finished process. Memory is not cached, so that a bound is that of a tensor."""
    # cuda-bindings asks the driver for functions it may not have, and each answer "no" would count as an error
    options = ["--tool", tool, "--error-exitcode", "9", *(["--report-api-errors", "no"] if tool == "memcheck" else [])]
    command = [TOOL, *options, sys.executable]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("sanitized_launches.py")), kernel],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device here")
    return done


@pytest.fixture(scope="module", autouse=True)
def watching():
    done = sanitized("memcheck", "out_of_bounds")
    assert done.returncode and "Invalid __global__ write" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("tool", CLEAN)
@pytest.mark.parametrize("kernel", KERNELS)
def test_clean(kernel, tool):
    done = sanitized(tool, kernel)
    assert "launched and right" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert CLEAN[tool] in done.stdout and done.returncode == 0, done.stdout[-3000:]
