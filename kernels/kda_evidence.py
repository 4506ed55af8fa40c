"""What can be said about the two KDA claims on this machine: three kinds of evidence, each with what it does not show.

The claims are for an AMD MI350X (gfx950) and an NVIDIA B200 (sm_100), with shapes that are not published. Nothing here
stands in for a measurement there, and our kernel is not the one that was measured there.
"""

import json
from collections.abc import Callable
from pathlib import Path

from kernels.foreign import describe

RECORD = Path(__file__).with_name("kda_measured.json")
Progress = Callable[[int, int, str], None]

CLAIMS = {
    "kda-mi350x": {
        "hardware": "AMD Instinct MI350X (gfx950)",
        "baseline": "vLLM's ROCm KDA kernels",
        "target": "gfx950",
        "known": [
            "The card of the authors' trace data set: 3.01 times, \"verified\", 73 iterations, $3,018.",
            "On gfx950 vLLM's default is a HIP prologue and recurrence, which its authors measured at about twice the "
            "speed of vLLM's chain of nine Triton kernels (vllm-project/vllm pull requests 52606, 54038 and 56036).",
        ],
        "unknown": [
            "Which of the two vLLM paths the baseline was: a factor of two.",
            "The shapes, the tolerances, the timer and the state of the caches.",
        ],
        "to_judge": "an MI350X, and vLLM built for ROCm there; its op is not wrapped here, as it could not be run",
    },
    "kda-b200": {
        "hardware": "NVIDIA B200 (sm_100)",
        "baseline": "FlashKDA",
        "target": "sm_100a",
        "known": [
            "The card of the authors' trace data set: 3.44 times on a set \"Int21\" (re-measured), 2.42 times on a set "
            "\"serving\", 26 + 16 iterations, $1,832.",
            "Others report 2.0 to 3.1 times FlashKDA on B200 on the six shapes of FlashKDA's own benchmark.",
        ],
        "unknown": [
            "The shapes of both sets, the tolerances, the timer, the state of the caches, FlashKDA's version.",
            "Whether \"Int21\" is the 21-shape set that FlashInfer has.",
        ],
        "to_judge": "a B200 with tokenspeed-flashkda installed; the 14 shapes measured here are not those of the claim",
    },
}  # fmt: skip

SHOWS = {
    "correctness": (
        "The portable source computes KDA: its own code, run by Triton's interpreter, agrees with the fp64 recurrence.",
        "Races, the rounding of tensor cores, compiler faults, speed.",
    ),
    "hardware_correctness": (
        "What runs on this GPU computes KDA: it agrees with the fp64 recurrence within bf16 rounding.",
        "Anything about another GPU.",
    ),
    "machine_code": (
        "The portable source compiles for the claim's GPU with the installed Triton, to its matrix instructions.",
        "That it runs there, is right there, or is fast there.",
    ),
    "measurement": (
        "Kernel times of KDA prefill on this GPU against FLA and FlashKDA, on shapes of public benchmarks.",
        "Anything about an MI350X or a B200: neither the ratio nor its order carries over from one chip to another.",
    ),
    "record": (
        "Kernel times once measured on the GPU named in the record, under the conditions it lists.",
        "Anything about an MI350X or a B200, or about this machine.",
    ),
}


def _no_progress(done: int, total: int, label: str) -> None:
    pass


def evidence(progress: Progress | None = None, *, modes: tuple[str, ...] = tuple(CLAIMS)) -> dict:
    """JSON-able: {"claims": {mode: ...}, "evidence": {kind: {"shows", "does_not_show", ...}}, "device": name or None}.

    A claim's entry has `here` (whether its GPU is the one in this machine), `verdict` ("hardware-unavailable",
    "baseline-unavailable" or "not-run": no mode can be judged while the shapes are unpublished), `reason`, `known`,
    `unknown`, `to_judge`. Measures where there is a CUDA or ROCm device, otherwise shows the shipped record. Takes
    about a minute without a GPU, and several with one, most of them FLA's tuning.
    """
    import torch

    progress = progress or _no_progress
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    chip = _chip(device)
    found = {"correctness": _labeled("correctness", _interpreted(progress))}
    if device:
        from kernels import kda_check
        from kernels.kda_prefill import implementation

        rows = kda_check.run("cuda", progress)
        found["hardware_correctness"] = _labeled(
            "hardware_correctness", {"implementation": implementation(device), "rows": rows}
        )
    found["machine_code"] = _labeled("machine_code", _compiled([CLAIMS[mode]["target"] for mode in modes], progress))
    if device:
        from kernels.kda_measure import measure_kda

        try:
            found["measurement"] = _labeled("measurement", measure_kda(device, progress=progress))
        except RuntimeError as error:  # other parts of the report do not depend on it
            failed = f"the measurement on this GPU failed: {describe(error)}"
            found["record"] = _labeled("record", recorded()) | {"error": failed}
    else:
        found["record"] = _labeled("record", recorded())
    return {
        "device": torch.cuda.get_device_name(device) if device else None,
        "claims": {mode: _claim(mode, chip) for mode in modes},
        "evidence": found,
    }


def recorded() -> dict:
    """The shipped measurement, with its summary."""
    from kernels.kda_measure import summarize

    record = json.loads(RECORD.read_text())
    return record | {"summary": summarize(record["rows"])}


def _labeled(kind: str, content: dict) -> dict:
    shows, does_not_show = SHOWS[kind]
    return {"shows": shows, "does_not_show": does_not_show} | content


def _interpreted(progress: Progress) -> dict:
    from kernels.kda_check import in_interpreter

    progress(0, 1, "interpreter")
    return in_interpreter()


def _compiled(targets: list[str], progress: Progress) -> dict:
    from kernels import kda_compile

    jobs = [(target, name) for target in targets for name in kda_compile.kernels(target)]
    machines, errors = [], []
    for number, (target, name) in enumerate(jobs):
        progress(number, len(jobs), f"{name} for {target}")
        try:
            machines.append(kda_compile.compile_kernel(target, name).to_json())
        except Exception as error:  # compilers' errors have no common type; each is evidence, not a reason to stop
            errors.append({"target": target, "kernel": name, "error": describe(error)})
    return {"kernels": machines, "errors": errors}


def _chip(device) -> str:
    """The compile target of the GPU here, empty when it is none of the claims'."""
    import torch

    if device is None:
        return ""
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm_100a" if torch.cuda.get_device_capability(device) == (10, 0) else ""


def _claim(mode: str, chip: str) -> dict:
    from kernels import kda_baselines

    claim = CLAIMS[mode]
    here = chip == claim["target"]
    if not here:
        verdict, reason = "hardware-unavailable", f"the claim is for {claim['hardware']}, which is not here"
    elif mode == "kda-b200" and kda_baselines.installed(kda_baselines.FLASH_KDA):
        verdict, reason = "not-run", "measured here against FlashKDA, but the claim's shapes are not published"
    else:
        verdict, reason = "baseline-unavailable", f"{claim['baseline']} cannot be run here"
    return {"here": here, "verdict": verdict, "reason": reason} | {k: v for k, v in claim.items() if k != "target"}
