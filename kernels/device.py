"""Facts about the GPU that a timing depends on: what it is, its clock now, who else uses it, how fast it copies."""

import platform
import statistics
from importlib import metadata

import torch


def describe(device: torch.device) -> dict:
    """Name, compute capability, SM count, L2 and memory size (bytes) of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
    }


def versions() -> dict[str, str]:
    """Versions of everything that decides what is measured; packages that are not installed are left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for package in ("triton", "flashinfer-python", "apache-tvm-ffi", "cuda-core", "nvidia-cuda-nvrtc", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["driver"] = (
            _nvml(torch.device("cuda"), lambda nvml, handle: nvml.nvmlSystemGetDriverVersion()) or "unknown"
        )
    return found


def snapshot(device: torch.device) -> dict:
    """SM clock (MHz) under load, temperature (C), power (W) and the number of other processes on the GPU.

    A field is None when NVML does not tell. The clock is read while a spinning kernel keeps the GPU awake.
    """

    def read(nvml, handle):
        processes = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))  # this one among them
        return {
            "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "other_processes": max(processes - 1, 0),
        }

    torch.cuda._sleep(40_000_000)
    found = _nvml(device, read) or dict.fromkeys(("sm_clock_mhz", "temperature_c", "power_w", "other_processes"))
    torch.cuda.synchronize(device)
    return found


def copy_tb_s(device: torch.device, size: int = 1 << 30) -> float:
    """Device-to-device copy rate in TB/s, bytes read plus bytes written: what "bandwidth" is compared with."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(12):
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * size / statistics.median(times[2:]) / 1e12


def _nvml(device: torch.device, read):
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return read(pynvml, handle)
    except pynvml.NVMLError:
        return None
