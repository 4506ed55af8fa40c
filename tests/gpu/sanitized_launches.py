"""A few launches of one kernel, for compute-sanitizer. Inputs are made and outputs compared on the CPU: no other kernel
is watched."""

import sys

import torch
from mla_inputs import paged_inputs

from kernels.kda_prefill import Schedule, kda_prefill, kda_prefill_triton
from kernels.kda_reference import kda_reference
from kernels.kda_regimes import error_ratio, kda_inputs
from kernels.mla_paged_decode import mla_paged_decode
from kernels.mla_paged_decode_triton import mla_paged_decode_triton
from kernels.reference import compare, mla_paged_decode_reference


def there(values):
    return tuple(value.cuda() if isinstance(value, torch.Tensor) else value for value in values)


def decode(kernel):
    for lengths, options in (
        ([300, 0, 33, 1], {}),
        ([0, 9000, 5], {"first": 3, "fused": True}),
        ([200, 17], {"page_size": 16, "heads": 8, "dtype": torch.float16}),
    ):
        arguments, kv_lens = paged_inputs(lengths, **options)
        lens = kv_lens.cuda() if kv_lens is not None else None
        outputs = [part.cpu() for part in kernel(*there(arguments), kv_lens=lens)]
        expected = mla_paged_decode_reference(*arguments, kv_lens)
        errors = compare(outputs, expected, out_dtype=arguments[0].dtype)
        assert errors.ok, errors.reason


def prefill(kernel):
    for lengths, schedule in (([130, 0, 65, 1], None), ([400], Schedule(64, 4, 3, 2))):
        arguments, keywords = kda_inputs(lengths, 2, dtype=torch.bfloat16)
        names = [name for name, value in keywords.items() if isinstance(value, torch.Tensor)]
        moved = keywords | dict(zip(names, there(keywords[name] for name in names)))
        found = kernel(*there(arguments), **moved, schedule=schedule)
        expected = kda_reference(*arguments, **keywords)
        assert max(error_ratio(part.cpu(), want) for part, want in zip(found, expected, strict=True)) < 6e-3


def out_of_bounds(_):
    """What memcheck must find, or it was not watching."""
    import triton
    import triton.language as tl

    @triton.jit
    def write(x, OFFSET: tl.constexpr):
        tl.store(x + OFFSET, 1.0)

    write[(1,)](torch.empty(8, device="cuda"), OFFSET=1 << 40)
    torch.cuda.synchronize()


KERNELS = {
    "mla_paged_decode": (decode, mla_paged_decode),
    "mla_paged_decode_triton": (decode, mla_paged_decode_triton),
    "kda_prefill": (prefill, kda_prefill),
    "kda_prefill_triton": (prefill, kda_prefill_triton),
    "out_of_bounds": (out_of_bounds, None),
}

if __name__ == "__main__":
    run, kernel = KERNELS[sys.argv[1]]
    run(kernel)
    print("launched and right")
