"""Versions that go with every number."""

import platform
from importlib import metadata

import torch

from kernels import device


def test_versions_name_what_is_installed_and_leave_out_what_is_not(monkeypatch):
    found = device.versions()
    assert found["python"] == platform.python_version() and found["torch"] == torch.__version__
    assert all(isinstance(version, str) and version for version in found.values())

    def nothing_installed(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing_installed)
    assert set(device.versions()) <= {"python", "torch", "cuda", "driver"}
