"""KDA prefill as a task: the shapes that public benchmarks share, FlashKDA or FLA's chunk_kda as the baseline."""

from dataclasses import dataclass

HEAD_DIM = 128
LOWER_BOUND = -5.0
# ||value - reference|| / ||reference|| of o, as in FlashKDA's tests, and of the states, as in FLA's; bf16 costs 4e-3
OUTPUT_LIMIT = 6e-3
STATE_LIMIT = 5e-3
MIXED = (1300, 547, 2048, 963, 271, 3063)
RAGGED = (17, 33, 65, 1, 15, 300)

DEFINITION = f"""\
# kda-prefill: Kimi Delta Attention over whole prompts, safe gate, {HEAD_DIM} channels a head

Define `kda_prefill(q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, initial_state, cu_seqlens)` in one Python
file. It returns `(o, final_state)`.

| input | shape | dtype |
|---|---|---|
| q, k, v, g | [1, T, H, {HEAD_DIM}] | bfloat16; g is the gate's input |
| beta | [1, T, H] | bfloat16, logits |
| A_log | [H] | float32 |
| dt_bias | [H * {HEAD_DIM}] | float32 |
| scale, lower_bound | Python floats | {HEAD_DIM}^-0.5 and {LOWER_BOUND} |
| initial_state | [N, H, {HEAD_DIM}, {HEAD_DIM}] | float32, [value channel, key channel] |
| cu_seqlens | [N + 1] | int64, on the GPU, from 0 to T |

| output | shape | dtype |
|---|---|---|
| o | [1, T, H, {HEAD_DIM}] | bfloat16 |
| final_state | [N, H, {HEAD_DIM}, {HEAD_DIM}] | float32 |

Sequence n has the tokens cu_seqlens[n] ... cu_seqlens[n + 1] - 1. Per head, with the state S [value, key]:

    q, k <- x * rsqrt(sum x^2 + 1e-6), q <- q * scale
    S <- S diag(exp(lower_bound * sigmoid(exp(A_log) * (g_t + dt_bias))))
    S <- S + sigmoid(beta_t) (v_t - S k_t) k_t^T
    o_t = S q_t

## Rules
- Right means: finite everywhere, ||o - reference|| / ||reference|| at most {OUTPUT_LIMIT}, of the states at most
  {STATE_LIMIT}; the reference goes token by token in fp64.
- Gates may be saturated at lower_bound for many tokens in a row, keys may be nearly equal: no product of exp(gate)
  over more than 16 tokens may be inverted in fp32, and the inverse of a chunk's triangular matrix must not come from a
  power series.
- Sequences of 0 to 32,768 tokens, any number of them. An empty sequence keeps its state.
- Values in the same buffers change between calls, lengths included: keep nothing derived from contents between calls.
- All work is done on the current stream, inputs are left as they are, outputs are new tensors, the host does not wait.

## What is timed
GPU time of one call with a cold L2 cache, host time not counted. The score is the geometric mean of the baseline's
time divided by yours; the baseline is FlashKDA where it is installed, else FLA's chunk_kda with safe_gate=True. Any
wrong workload scores 0.
"""

TECHNIQUES = {
    "chunked": r"(?i)chunk",
    "tensor-cores": r"tl\.dot|mma\.sync|wgmma|warpgroup_mma",
    "forward-substitution": r"(?i)substitut|solve_tri",
    "block-anchors": r"(?i)anchor|before|block_start",
    "value-split": r"(?i)\bBV\b|block_v",
    "segmented-scan": r"(?i)segment",
    "register-state": r"(?i)register",
    "async-copy": r"cp\.async|num_stages|async_copy",
    "tma": r"cp\.async\.bulk|tensor_descriptor|TensorDescriptor",
    "warp-specialization": r"warp_specialize|setmaxnreg",
    "cuda-c++": r"__global__",
}


@dataclass(frozen=True, slots=True)
class KDAWorkload:
    """Heads, and the tokens of each sequence."""

    index: int
    name: str
    heads: int
    lens: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.lens)

    @property
    def tokens(self) -> int:
        return sum(self.lens)

    @property
    def bytes_moved(self) -> int:
        """What any kernel must move: q, k, v, g and beta in, o out, and the states once each way."""
        per_token = 5 * HEAD_DIM * 2 + 2
        return self.heads * (self.tokens * per_token + self.batch * 2 * HEAD_DIM * HEAD_DIM * 4)


_SHAPES = (
    (96, (8192,)), (96, MIXED), (96, (1024,) * 8), (64, (8192,)), (64, MIXED), (64, (1024,) * 8), (32, (8192,)),
    (32, (2048,)), (16, (2048,)), (12, (8192,)), (12, (32768,)), (32, (512,)), (12, (512,)), (32, RAGGED),
)  # fmt: skip


def _name(heads: int, lens: tuple[int, ...]) -> str:
    kinds = {MIXED: "mixed", RAGGED: "ragged"}
    return f"{heads} x " + (kinds.get(lens) or (f"{len(lens)} x {lens[0]}" if len(lens) > 1 else str(lens[0])))


WORKLOADS = tuple(KDAWorkload(i, _name(heads, lens), heads, lens) for i, (heads, lens) in enumerate(_SHAPES))
FEEDBACK = (2, 3, 9, 11, 13)
AWKWARD = (
    KDAWorkload(100, "one-token", 2, (1,)),
    KDAWorkload(101, "empty-sequences", 1, (0, 5, 0, 64, 1, 0)),
    KDAWorkload(102, "around-chunks", 3, (15, 16, 17, 63, 64, 65, 127, 128, 129)),
    KDAWorkload(103, "one-long-among-short", 2, (1, 700, 3)),
)


def make_inputs(workload: KDAWorkload, seed: int, device) -> tuple:
    """The definition's positional arguments: unit normal q, k, v, g and beta, A_log and dt_bias uniform in [0, 1)."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def make(*shape, kind=torch.randn, dtype=torch.bfloat16):
        return kind(*shape, generator=generator, dtype=dtype, device=device)

    tokens, heads = workload.tokens, workload.heads
    qkvg = (make(1, tokens, heads, HEAD_DIM) for _ in range(4))
    starts = torch.tensor([0, *workload.lens], device=device).cumsum(0)
    return (
        *qkvg,
        make(1, tokens, heads),
        make(heads, kind=torch.rand, dtype=torch.float32),
        make(heads * HEAD_DIM, kind=torch.rand, dtype=torch.float32),
        HEAD_DIM**-0.5,
        LOWER_BOUND,
        make(workload.batch, heads, HEAD_DIM, HEAD_DIM, dtype=torch.float32),
        starts,
    )


def keywords(inputs: tuple) -> dict:
    """The arguments behind beta by the names that `kda_prefill` and the baselines have for them."""
    names = ("A_log", "dt_bias", "scale", "lower_bound", "initial_state", "cu_seqlens")
    return dict(zip(names, inputs[5:], strict=True))


def reference(inputs: tuple) -> tuple:
    """(o, final_state) in fp64."""
    from kernels.kda_reference import kda_reference

    return kda_reference(*inputs[:5], **keywords(inputs))


def compare(outputs, expected):
    """Errors of (o, final_state) against the reference; `lse_error` is the error ratio of the states."""
    import math

    import torch

    from kernels.reference import Errors

    if not isinstance(outputs, tuple | list) or len(outputs) != 2:
        return Errors(
            False, f"returned {type(outputs).__name__}, must return (o, final_state)", math.inf, math.inf, math.inf
        )
    for name, value, wanted, dtype in zip(
        ("o", "final_state"), outputs, expected, (torch.bfloat16, torch.float32), strict=True
    ):
        if type(value) is not torch.Tensor or (value.shape, value.dtype) != (wanted.shape, dtype):
            seen = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            return Errors(
                False, f"{name} is {seen}, must be {dtype} {list(wanted.shape)}", math.inf, math.inf, math.inf
            )
    ratios = [_error_ratio(value, wanted) for value, wanted in zip(outputs, expected, strict=True)]
    reason = ""
    for name, ratio, limit in zip(("o", "final_state"), ratios, (OUTPUT_LIMIT, STATE_LIMIT), strict=True):
        if not ratio <= limit and not reason:
            reason = f"{name} has error ratio {ratio:.2e}, must be at most {limit:.0e}"
    difference = (outputs[0].double() - expected[0]).abs()
    return Errors(not reason, reason, difference.max().item() if difference.numel() else 0.0, ratios[1], ratios[0])


def _error_ratio(value, wanted) -> float:
    """||value - wanted|| / ||wanted||, infinite where something is not finite."""
    if not value.isfinite().all():
        return float("inf")
    norm = wanted.norm().item()
    error = (value.double() - wanted).norm().item()
    return error / norm if norm else error


def baseline(inputs: tuple):
    """(name, callable) of FlashKDA where it is installed, else of FLA's chunk_kda."""
    from kernels import kda_baselines

    name = kda_baselines.FLASH_KDA if kda_baselines.installed(kda_baselines.FLASH_KDA) else kda_baselines.FLA
    return name, kda_baselines.prepare(name, *inputs[:5], **keywords(inputs))


def task():
    """The task as `kernels.tasks` lists it."""
    from kernels.tasks import Task

    return Task(
        name="kda-prefill",
        title="KDA prefill against FlashKDA or FLA",
        device="cuda",
        entry_point="kda_prefill",
        definition=DEFINITION,
        workloads=WORKLOADS,
        feedback=FEEDBACK,
        awkward=AWKWARD,
        make_inputs=make_inputs,
        reference=reference,
        baseline=baseline,
        compare=compare,
        techniques=TECHNIQUES,
    )
