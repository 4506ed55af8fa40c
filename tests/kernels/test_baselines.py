"""FlashInfer missing or too old is one clear line; what plan() reads stands where it should."""

from importlib import metadata

import pytest
import torch

from kernels import baselines
from kernels.baselines import BaselineUnavailable, PlanMetadata, build, flashinfer_backends

CUDA = torch.device("cuda")


@pytest.fixture
def installed(monkeypatch):
    """`installed(version, capability)` makes it look so; version None is not installed."""

    def pretend(version, capability):
        def find(name):
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", find)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return pretend


def test_missing(installed):
    installed(None, (9, 0))
    with pytest.raises(BaselineUnavailable) as error:
        flashinfer_backends(CUDA)
    assert str(error.value) == "FlashInfer is not installed: pip install flashinfer-python"


@pytest.mark.parametrize("version", ["0.6.11", "0.2.5.post1"])
def test_too_old(installed, version):
    installed(version, (9, 0))
    with pytest.raises(BaselineUnavailable) as error:
        flashinfer_backends(CUDA)
    assert (
        str(error.value) == f"FlashInfer {version} is too old, 0.7 or newer is needed: pip install -U flashinfer-python"
    )


def test_backends_by_capability(installed):
    for capability, wanted in {(9, 0): ("fa3", "fa2"), (8, 0): ("fa2",), (10, 0): ("fa2",), (12, 0): ("fa2",)}.items():
        installed("0.7.4", capability)
        assert flashinfer_backends(CUDA) == wanted
    installed("1.0.0rc1", (7, 5))
    with pytest.raises(BaselineUnavailable, match="needs compute capability 8.0 or newer, this GPU has 7.5"):
        flashinfer_backends(CUDA)


class Wrapper:
    """Stands for FlashInferMLA: fa3 does not build, fa2 does."""

    failing = ("fa3",)

    def __init__(self, backend, device):
        self.backend = backend

    def plan(self, inputs):
        if self.backend in self.failing:
            raise RuntimeError("Ninja build failed.\nnvcc: command not found")


def test_a_backend_that_does_not_build_is_left_out_and_none_is_an_error(installed, monkeypatch):
    installed("0.7.4", (9, 0))
    monkeypatch.setattr(baselines, "FlashInferMLA", Wrapper)
    told = []
    assert list(build(torch.device("cpu"), told.append)) == ["fa2"]
    assert told[0].startswith("FlashInfer fa3")
    monkeypatch.setattr(Wrapper, "failing", ("fa3", "fa2"))
    with pytest.raises(BaselineUnavailable) as error:
        build(torch.device("cpu"))
    assert str(error.value) == (
        "FlashInfer's kernels could not be built, is nvcc on PATH? "
        "fa3: nvcc: command not found; fa2: nvcc: command not found"
    )


def test_plan_metadata():
    kv_indptr = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    kv_indices = torch.arange(8, dtype=torch.int32)
    found = PlanMetadata.of(kv_indptr, kv_indices, "device")
    assert found.qo_indptr.tolist() == [0, 1, 2, 3]
    assert found.kv_lens.tolist() == [3, 0, 5]
    assert found.kv_indices is kv_indices and found.kv_indptr is kv_indptr
    assert {t.dtype for t in (found.qo_indptr, found.kv_lens)} == {torch.int32}
