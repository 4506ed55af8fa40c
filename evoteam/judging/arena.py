"""Memory shared with the process that runs a kernel: inputs changed in place, outputs taken away at once."""

import fcntl
import math
import mmap
import os

import torch

ALIGNMENT = 64
REGION_BYTES = 1 << 30  # address space; memory is taken as it is touched
POISON = 0xFF  # as bf16, fp16, fp32 and fp64: NaN


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


class Region:
    """Tensors one after another in a memfd whose size nobody can change: shrunk, it would kill its readers."""

    def __init__(self):
        self.fd = os.memfd_create("evoteam", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, REGION_BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.memory = mmap.mmap(self.fd, 0)
        self.specs: list[dict] = []
        self.tensors: list = []

    def lay_out(self, values: list, names: list[str]) -> None:
        """Places `values` (tensors or numbers); their contents are not copied yet."""
        if size_of(values) > REGION_BYTES:
            raise MemoryError(f"a workload takes {size_of(values):,} bytes, shared memory has {REGION_BYTES:,}")
        self.specs, self.tensors, offset = [], [], 0
        for name, value in zip(names, values):
            if not isinstance(value, torch.Tensor):
                self.specs.append({"name": name, "value": value})
                self.tensors.append(value)
                continue
            dtype = str(value.dtype).removeprefix("torch.")
            self.specs.append({"name": name, "dtype": dtype, "shape": list(value.shape), "offset": offset})
            if value.numel():
                flat = torch.frombuffer(self.memory, dtype=value.dtype, count=value.numel(), offset=offset)
                self.tensors.append(flat.view(value.shape))
            else:
                self.tensors.append(torch.empty_like(value))
            size = value.numel() * value.element_size()
            offset += -(-size // ALIGNMENT) * ALIGNMENT

    def read(self, spec: dict) -> torch.Tensor:
        """A copy of what somebody else laid out: dtype, shape and offset are as good as they are."""
        dtype, shape = getattr(torch, spec["dtype"]), spec["shape"]
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {shape} has a negative size")
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=spec["offset"]).view(shape).clone()

    def close(self) -> None:
        self.tensors = []
        os.close(self.fd)


def size_of(values) -> int:
    """Bytes that `values` take in a Region."""
    sizes = (v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


class Arena:
    """Inputs and outputs of one process. The memory is the candidate's: the evaluator has a copy of its inputs."""

    def __init__(self):
        self.inputs, self.outputs = Region(), Region()
        self.sent = False

    def bind(self, peer, inputs: tuple, outputs: tuple, names: tuple[str, ...]) -> dict:
        """Lays out a workload and tells the process where everything is."""
        self.inputs.lay_out(list(inputs), [str(i) for i in range(len(inputs))])
        self.outputs.lay_out(list(outputs), list(names))
        self.write(inputs)
        fds = () if self.sent else (self.inputs.fd, self.outputs.fd)
        self.sent = True
        return peer.request("bind", fds, inputs=self.inputs.specs, outputs=self.outputs.specs)

    def write(self, inputs: tuple) -> None:
        for shared, value in zip(self.inputs.tensors, inputs):
            if isinstance(value, torch.Tensor):
                shared.copy_(value)

    def poison(self) -> None:
        """Fills the outputs with NaN, so that nothing stands there from an earlier call."""
        for tensor in self.outputs.tensors:
            _bytes(tensor).fill_(POISON)

    def take(self) -> tuple:
        """Private copies of the outputs as they are now."""
        return tuple(tensor.clone() for tensor in self.outputs.tensors)

    def edited(self, inputs: tuple) -> list[int]:
        """Positions of inputs that no longer hold, bit for bit, what was written."""
        return [
            i
            for i, (shared, value) in enumerate(zip(self.inputs.tensors, inputs))
            if isinstance(value, torch.Tensor) and not torch.equal(_bytes(shared), _bytes(value))
        ]

    def close(self) -> None:
        self.inputs.close()
        self.outputs.close()
