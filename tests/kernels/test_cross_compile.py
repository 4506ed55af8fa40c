"""The portable kernel compiled for GPUs that need not be here, with the installed Triton and with the oldest one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST_TRITON = "3.6.0"
SCRIPT = """
import json, sys, torch
from kernels.mla_paged_decode_triton import cross_compile
for case in json.loads(sys.argv[1]):
    case["dtype"] = getattr(torch, case["dtype"])
    facts = cross_compile(**case)
    ptx = facts.pop("ptx") or ""
    print(json.dumps(facts | {"async_copies": ptx.count("cp.async.cg"), "products": ptx.count("mma.sync")}))
"""
HOPPER = [
    {"arch": "sm_90", "heads": heads, "page_size": page_size, "batch": batch, "dtype": dtype}
    for heads, page_size, batch, dtype in (
        (16, 1, 1, "bfloat16"),
        (16, 1, 64, "bfloat16"),
        (16, 1, 5000, "bfloat16"),
        (16, 64, 64, "float16"),
        (128, 1, 64, "bfloat16"),
    )
]
OTHERS = {  # bytes of shared memory that one program may use
    "sm_80": 166_912,
    "sm_89": 101_376,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
    "gfx950": 163_840,
}


def compile_cases(cases, cache, *folders):
    """Facts of every case, from a process of its own: here the interpreter may be on, or another Triton loaded."""
    path = os.pathsep.join([*map(str, folders), str(ROOT), *filter(None, sys.path)])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(cases)],
        env=environment | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def check_hopper(facts):
    print(*facts, sep="\n")
    for fact in facts:
        assert fact["spill_bytes"] == 0, fact
        assert 64 <= fact["registers"] <= 255, fact
        assert fact["shared_bytes"] <= 232_448, fact
        assert fact["async_copies"] >= 18, f"rows are not copied asynchronously in 16-byte pieces: {fact}"
        assert fact["products"] >= 68, f"36 + 32 products of a tile and warp are not matrix instructions: {fact}"


@pytest.fixture(scope="session")
def oldest_triton(pytestconfig, tmp_path_factory):
    """A folder that holds only Triton 3.6.0, kept between runs."""
    folder = Path(pytestconfig.cache.mkdir("triton")) / OLDEST_TRITON
    if not folder.exists():
        fresh = folder.with_name(f"{OLDEST_TRITON}.{os.getpid()}")
        wanted = ["--no-deps", "--only-binary", ":all:", "--target", str(fresh), f"triton=={OLDEST_TRITON}"]
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
        run = subprocess.run(install, capture_output=True, text=True, timeout=600)
        if run.returncode:
            reason = (run.stderr.strip().splitlines() or ["pip failed"])[-1]
            pytest.skip(f"Triton {OLDEST_TRITON} cannot be installed into a folder of its own: {reason}")
        fresh.rename(folder)
    return folder


def test_hopper_with_the_installed_triton(tmp_path):
    facts = compile_cases(HOPPER, tmp_path)
    assert len(facts) == len(HOPPER)
    check_hopper(facts)


def test_hopper_with_the_oldest_triton(tmp_path, oldest_triton):
    facts = compile_cases(HOPPER, tmp_path, oldest_triton)
    assert [fact["compiler"] for fact in facts] == [f"Triton {OLDEST_TRITON}"] * len(HOPPER)
    check_hopper(facts)


def test_other_gpus_get_a_tile_that_fits(tmp_path):
    facts = compile_cases([{"arch": arch, "dtype": "bfloat16"} for arch in OTHERS], tmp_path)
    assert len(facts) == len(OTHERS)
    for shared_memory, fact in zip(OTHERS.values(), facts):
        assert fact["spill_bytes"] == 0, fact
        assert 0 < fact["shared_bytes"] <= shared_memory, fact
