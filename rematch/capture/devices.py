"""What devices can do at best, so that a plan can be made for one that is not here.

`find_device("h100").matrix_flops_per_second(torch.bfloat16, tf32=False)`

GPU rates are the vendor's for dense arithmetic, with tensor cores where a type has them; "cpu" is the machine this runs
on, measured once, when first asked for. A name without a memory size means the smallest card of that name, so that a
plan for it fits them all.

Links to host memory are PCI Express with 16 lanes, of the generation that the vendor's data sheet of a card names. We
measured generation 5 on an H200 with pinned memory: 55 GB/s out, 55 in and 44 each way at once, of 63 by its standard.
For the others we assume that copies reach the same share of what the standard says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import psutil  # type: ignore[import-untyped]
import torch
from torch.utils._python_dispatch import _disable_current_modes

from rematch.errors import DeviceError, unknown_name

_TERA = 1e12
_GIB = 2**30


@dataclass(frozen=True)
class LinkSpeeds:
    """Bytes in a second between a device and pinned host memory."""

    out_bytes_per_second: float  # from the device, while nothing comes in
    in_bytes_per_second: float  # to the device, while nothing goes out
    both_bytes_per_second: float  # each way, while both are busy


@dataclass(frozen=True)
class Device:
    """Rates in FLOP/s and bytes/s. The shares say how much of the rates the best real kernels reach."""

    name: str
    aliases: tuple[str, ...]
    fp64: float
    fp32: float
    tf32: float
    fp16: float
    bf16: float
    bytes_per_second: float
    memory_bytes: int
    launch_seconds: float  # an operator takes this long however little it does
    is_cuda: bool = True
    reached_flops: float = 0.8  # share of the rates above that a large matrix product reaches
    reached_bandwidth: float = 0.9  # share of the bandwidth that a large copy reaches
    link: LinkSpeeds | None = None  # to host memory; None for the machine that this runs on, whose link is measured

    def matrix_flops_per_second(self, dtype: torch.dtype, *, tf32: bool) -> float:
        """Best real rate of matrix products. A type narrower than 16 bits counts as fp16: its own rate is not here."""
        if dtype is torch.bfloat16:
            peak = self.bf16
        elif dtype.itemsize <= 2:
            peak = self.fp16
        elif dtype is torch.float32 and tf32:
            peak = self.tf32
        else:
            peak = self.vector_flops_per_second(dtype)
        return peak * self.reached_flops

    def vector_flops_per_second(self, dtype: torch.dtype) -> float:
        """Peak rate outside tensor cores, where 16-bit types are computed in 32."""
        return self.fp64 if dtype in (torch.float64, torch.complex128) else self.fp32

    @property
    def copy_bytes_per_second(self) -> float:
        """Best real rate of reading and writing memory."""
        return self.bytes_per_second * self.reached_bandwidth


def find_device(name: str) -> Device:
    """The device of this name, in the spelling of people ("a100-80gb") or drivers ("NVIDIA A100-SXM4-80GB")."""
    wanted = _plain(name)
    if wanted in ("cpu", "thiscpu"):
        return _this_cpu()
    for device in _GPUS:
        if wanted in {_plain(known) for known in (device.name, *device.aliases)}:
            return device
    raise DeviceError(unknown_name("device", name, known_devices()))


def require_supported(device: torch.device, planned_for: str | None) -> None:
    """Refuse, in words, to train on a device whose memory and random state rematch cannot read.

    `planned_for` names the device that costs are estimated for, if there is one; nothing is measured then.
    """
    if device.type in ("cpu", "cuda"):  # ROCm calls itself cuda
        return
    if device.type != "meta":
        raise DeviceError(
            f"rematch does not train on {device.type!r} devices: it cannot measure memory there or replay random "
            "numbers. It supports CPU, CUDA and ROCm. Keep the plain module for this device, or plan on the CPU with "
            f"device=... for a GPU that is not here: {', '.join(known_devices())}"
        )
    if planned_for is None:
        raise DeviceError(
            "tensors on the 'meta' device have no data, so no operator can be measured; name the device to plan for "
            f"with rematch.plan(..., device=...): {', '.join(known_devices())}"
        )


def known_devices() -> tuple[str, ...]:
    """Names that `find_device` takes, without aliases."""
    return (*(device.name.lower() for device in _GPUS), "cpu")


def _plain(name: str) -> str:
    """Case, spaces, dashes and the vendor's name do not tell devices apart."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for vendor in ("nvidia", "geforce", "tesla"):
        plain = plain.removeprefix(vendor)
    return plain


def _gpu(
    name: str,
    *aliases: str,
    tera: tuple[float, float, float, float, float],
    gb_per_second: float,
    memory_gib: float,
    pcie: int,
    launch_seconds: float = 3e-6,
) -> Device:
    """`tera` has TFLOP/s in fp64, fp32, tf32, fp16, bf16; `memory_gib` is what the driver leaves to programs.

    `pcie` is the generation of its link to the host.
    """
    fp64, fp32, tf32, fp16, bf16 = (rate * _TERA for rate in tera)
    return Device(
        name=name,
        aliases=aliases,
        fp64=fp64,
        fp32=fp32,
        tf32=tf32,
        fp16=fp16,
        bf16=bf16,
        bytes_per_second=gb_per_second * 1e9,
        memory_bytes=int(memory_gib * _GIB),
        launch_seconds=launch_seconds,
        link=_pcie_link(pcie),
    )


def _pcie_link(generation: int) -> LinkSpeeds:
    """The speeds that copies reach over 16 lanes of PCI Express, each generation of which doubles the one before."""
    alone, both = (gb_per_second * 1e9 * 2.0 ** (generation - 5) for gb_per_second in (55, 44))
    return LinkSpeeds(alone, alone, both)


_A100 = (19.5, 19.5, 156.0, 312.0, 312.0)
_HOPPER = (67.0, 67.0, 494.7, 989.4, 989.4)
_V100 = (7.8, 15.7, 15.7, 125.0, 15.7)  # neither tf32 nor bf16 in hardware: both run as fp32

_GPUS = (
    _gpu(
        "A100-40GB", "A100", "A100-SXM4-40GB", "A100-PCIE-40GB", tera=_A100, gb_per_second=1555, memory_gib=39.4, pcie=4
    ),
    _gpu("A100-80GB", "A100-SXM4-80GB", "A100 80GB PCIe", tera=_A100, gb_per_second=2039, memory_gib=79.1, pcie=4),
    _gpu("H100", "H100-80GB", "H100 80GB HBM3", "H100-SXM", tera=_HOPPER, gb_per_second=3352, memory_gib=79.1, pcie=5),
    _gpu("H200", "H200-141GB", "H200-SXM", tera=_HOPPER, gb_per_second=4800, memory_gib=139.8, pcie=5),
    _gpu("RTX-4090", "4090", tera=(1.29, 82.6, 82.6, 165.2, 165.2), gb_per_second=1008, memory_gib=23.5, pcie=4),
    _gpu("V100-16GB", "V100", "V100-SXM2-16GB", tera=_V100, gb_per_second=900, memory_gib=15.7, pcie=3),
    _gpu("V100-32GB", "V100-SXM2-32GB", tera=_V100, gb_per_second=900, memory_gib=31.7, pcie=3),
    _gpu(
        "P100",
        "P100-16GB",
        "P100-SXM2-16GB",
        "P100-PCIE-16GB",
        tera=(4.7, 9.3, 9.3, 18.7, 9.3),
        gb_per_second=732,
        memory_gib=15.9,
        pcie=3,
    ),
)


@cache
def _this_cpu() -> Device:
    """This machine as a device, timed with as many threads as torch uses now."""
    with _disable_current_modes(), torch.no_grad():  # a fake tensor would be timed instead of a real one
        fp32 = _matmul_flops_per_second(torch.float32)
        return Device(
            name="cpu",
            aliases=(),
            fp64=_matmul_flops_per_second(torch.float64),
            fp32=fp32,
            tf32=fp32,
            fp16=_matmul_flops_per_second(torch.float16),
            bf16=_matmul_flops_per_second(torch.bfloat16),
            bytes_per_second=_copy_bytes_per_second(),
            memory_bytes=psutil.virtual_memory().total,
            launch_seconds=_launch_seconds(),
            is_cuda=False,
            reached_flops=1.0,  # measured rates have been reached
            reached_bandwidth=1.0,
        )


def _matmul_flops_per_second(dtype: torch.dtype, size: int = 512) -> float:
    # Ones, not random numbers: the user's random state stays as it is, and a CPU multiplies both at the same speed.
    square = torch.ones(size, size, dtype=dtype, device="cpu")
    return 2 * size**3 / _fastest_seconds(lambda: torch.mm(square, square))


def _copy_bytes_per_second(size_bytes: int = 64 * 2**20) -> float:
    """Reading and writing counted; too large for caches."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device="cpu")
    copy = torch.empty_like(source)
    return 2 * size_bytes / _fastest_seconds(lambda: copy.copy_(source))


def _launch_seconds(calls: int = 100) -> float:
    one = torch.ones(1, device="cpu")

    def call_often() -> None:
        for _ in range(calls):
            torch.neg(one)

    return _fastest_seconds(call_often) / calls


def _fastest_seconds(run: Callable[[], object], repeats: int = 4) -> float:
    """The fastest of a few runs after a warm one: noise on a busy machine only ever adds."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
