"""Is KDA prefill right here? The regimes of kda_regimes.py against the fp64 reference, on a GPU or in Triton's
interpreter.

TRITON_INTERPRET=1 python -m kernels.kda_check        prints one JSON object
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

TAILS = [1, 15, 16, 17, 0, 63, 64, 65]
INTERPRETER_TIMEOUT_S = 600

# error ratios of outputs and states that a right kernel stays below; rounding to bf16 tells most on nearly equal keys
FP32_LIMIT = 1e-5
BF16_LIMIT = 6e-3
BF16_LIMITS = {"checkpoint": 2e-2, "collinear keys": 2e-2}


def run(device: str, progress=None) -> list[dict]:
    """Rows of case, error ratios of outputs and states, limit and whether they pass. float32 on "cpu", else
    bfloat16."""
    import torch

    from kernels.kda_prefill import choose_schedule, kda_prefill
    from kernels.kda_reference import kda_reference
    from kernels.kda_regimes import REGIMES, error_ratio, kda_inputs

    on_cpu = device == "cpu"
    dtype, limits, usual = (torch.float32, {}, FP32_LIMIT) if on_cpu else (torch.bfloat16, BF16_LIMITS, BF16_LIMIT)
    serial = replace(
        choose_schedule(target="cpu", sms=1, sequences=1, heads=1, tokens=1), block_v=128 if on_cpu else 32
    )
    heads = 1 if on_cpu else 3
    cases = [(regime, regime, {"lengths": [100]}, None) for regime in REGIMES]
    cases += [
        # without decay, so that states reach from chunk to chunk
        ("lengths 0 to 65 side by side", "weak decay", {"lengths": TAILS}, None),
        ("batch of equal lengths", "weak decay", {"lengths": [70], "batch": 2}, None),
        ("serial", "weak decay", {"lengths": [140, 0, 70]}, serial),
        ("segmented", "weak decay", {"lengths": [140, 0, 70]}, replace(serial, segment=1)),
    ]
    rows = []
    for number, (name, regime, shape, schedule) in enumerate(cases):
        arguments, keywords = kda_inputs(**shape, heads=heads, regime=regime, dtype=dtype, device=device)
        found = kda_prefill(*arguments, **keywords, schedule=schedule or (serial if on_cpu else None))
        o, state = (error_ratio(a, b) for a, b in zip(found, kda_reference(*arguments, **keywords), strict=True))
        limit = limits.get(regime, usual)
        rows.append({"case": name, "o": o, "state": state, "limit": limit, "ok": max(o, state) <= limit})
        if progress:
            progress(number + 1, len(cases), name)
    return rows


def in_interpreter() -> dict:
    """`run("cpu")` in a process of its own, as Triton decides at import whether it interprets. {"rows": ...} or
    {"error": ...}."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, sys.path)])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kernels.kda_check"],
            env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
            cwd=root,
            capture_output=True,
            text=True,
            timeout=INTERPRETER_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the interpreter was not done after {INTERPRETER_TIMEOUT_S} s"}
    if done.returncode:
        return {
            "error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
        }
    return json.loads(done.stdout)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    print(json.dumps({"rows": run("cpu")}))
