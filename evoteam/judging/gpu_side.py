"""Inputs of a workload on the GPU and calls of one function on them, in the candidate's process and in the evaluator's.

Both get the same seeds, so that the evaluator's inputs are at all times what the candidate's should be, bit for bit.
"""

import dataclasses

FLIP_BYTES = 64 << 20  # inputs below this size get new values before every timed call
AUDIT_CALLS = 32


def variant(task, number: int, rotate: int):
    """A workload by its place among all timed and awkward ones; `rotate` moves the lengths to other requests."""
    workload = (*task.workloads, *task.awkward)[number]
    if rotate and hasattr(workload, "lens") and hasattr(workload, "family"):
        lens = workload.lens[rotate % workload.batch :] + workload.lens[: rotate % workload.batch]
        return dataclasses.replace(workload, lens=lens, family=-1, decoded=0, shared=())
    return workload


class GpuSide:
    """Inputs of one workload and calls of one function on them."""

    def __init__(self, task, device, stopwatch):
        import torch

        self.torch, self.task, self.device, self.stopwatch = torch, task, device, stopwatch
        self.generator = torch.Generator(self.device)
        self.inputs: tuple = ()
        self.buffers: dict = {}
        self.function = None

    @classmethod
    def on_gpu(cls, task_name: str) -> "GpuSide":
        """On the current CUDA device."""
        import torch

        from kernels.tasks import load_task
        from kernels.timing import Stopwatch

        device = torch.device("cuda", torch.cuda.current_device())
        return cls(load_task(task_name), device, Stopwatch(device, "dirty"))

    def prepare(self, number: int, seed: int, rotate: int = 0) -> None:
        """Inputs of a workload; into the buffers of the one before where the shapes are the same."""
        fresh = self.task.make_inputs(variant(self.task, number, rotate), seed, self.device)
        if [_layout(value) for value in fresh] == [_layout(value) for value in self.inputs]:
            for old, new in zip(self.inputs, fresh):
                if isinstance(old, self.torch.Tensor):
                    old.copy_(new)
        else:
            self.inputs = fresh
        self.flippable = [i for i, value in enumerate(fresh) if self._flippable(value)]

    def _flippable(self, value) -> bool:
        """Whether random signs make other valid values of it: small, and of both signs already."""
        tensor = isinstance(value, self.torch.Tensor) and value.is_floating_point()
        return bool(tensor and 0 < value.nbytes < FLIP_BYTES and (value < 0).any() and (value > 0).any())

    def flip(self, seed: int) -> None:
        """Multiplies the columns of the flippable inputs with random signs, in place."""
        self.generator.manual_seed(seed)
        for i in self.flippable:
            self.inputs[i].mul_(self._signs(self.inputs[i].shape[-1:], self.inputs[i].dtype))

    def _signs(self, shape, dtype):
        return self.torch.randint(0, 2, shape, generator=self.generator, device=self.device).mul_(2).sub_(1).to(dtype)

    def call(self, inputs=None, buffers=None) -> tuple:
        return self.function(*(inputs or self.inputs), **(self.buffers if buffers is None else buffers))

    def sample(self, seed: int | None) -> dict:
        """GPU microseconds of one call with a cold L2, and whether all of it was queued ahead.

        The call before it, in the same buffers, is on other values, and its outputs are poisoned. `flips` tells how
        often values were changed, from seeds counted up from `seed`; without a seed they stay. What the call's stream
        had written when it was done stays in `taken`.
        """
        outputs, flips = (), 0

        def before():
            nonlocal outputs, flips
            outputs = self.call()
            if seed is not None:
                self.flip(seed + flips)
                flips += 1
            for output in outputs:
                output.fill_(self.torch.nan)

        def call():
            nonlocal outputs
            outputs = self.call()

        def after():
            self.taken = tuple(output.clone() for output in outputs)

        us, queued = self.stopwatch.gpu_us(call, before, after)
        return {"us": us, "queued": queued, "flips": flips}

    def audit_setup(self) -> None:
        """Inputs for many calls: the large ones shared, the flippable ones each call's own."""
        self.stacks = {i: self.torch.stack([self.inputs[i]] * AUDIT_CALLS) for i in self.flippable}
        self.graph = self.audited = None

    def audit_capture(self, buffers: list[dict]) -> bool:
        """All those calls as one CUDA graph, if the function can be captured. Whether it could."""
        torch = self.torch
        calls = list(zip(map(self.audit_inputs, range(AUDIT_CALLS)), buffers))
        self.every_call = lambda: [self.call(inputs, keywords) for inputs, keywords in calls]
        self.audited = self.every_call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.audited = self.every_call()
        except RuntimeError:
            torch.cuda.synchronize()
            return False
        self.graph = graph
        return True

    def audit(self, seed: int, calls: bool) -> None:
        """New values for every call; then all calls, or none, and the wait for the GPU."""
        self.generator.manual_seed(seed)
        for stack in self.stacks.values():
            shape = (AUDIT_CALLS, *[1] * (stack.dim() - 2), stack.shape[-1])
            stack.mul_(self._signs(shape, stack.dtype))
        if calls and self.graph is not None:
            self.graph.replay()
        elif calls:
            self.audited = self.every_call()
        self.torch.cuda.synchronize()

    def audit_inputs(self, number: int) -> tuple:
        return tuple(self.stacks[i][number] if i in self.stacks else value for i, value in enumerate(self.inputs))


def _layout(value):
    return (tuple(value.shape), value.dtype) if hasattr(value, "dtype") else type(value)
