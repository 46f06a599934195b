"""Figures of devices and links, from their makers' data sheets, and how the user overrides them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl.errors import MeshdialError

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Device:
    """One accelerator. FLOP/s are dense, as JAX multiplies by default: float32 in TF32 on NVIDIA
    GPUs and in one bfloat16 pass on TPUs. `link` is one direction between devices of a mesh."""

    name: str
    bfloat16_flops: float
    float32_flops: float
    bandwidth: float  # bytes/s to its own memory
    memory: float  # bytes
    link: float  # bytes/s to a neighbour

    def flops(self, dtype: str) -> float:
        return self.float32_flops if dtype == "float32" else self.bfloat16_flops


def _device(name: str, bfloat16: float, float32: float, gb_s: float, gb: float, link: float):
    return Device(name, bfloat16 * TERA, float32 * TERA, gb_s * GIGA, gb * GIGA, link * GIGA)


DEVICES = {
    device.name: device
    for device in (
        _device("H100", 989, 494, 3350, 80, 450),
        _device("H200", 989, 494, 4800, 141, 450),
        _device("A100-40", 312, 156, 1555, 40, 300),
        _device("A100-80", 312, 156, 2039, 80, 300),
        _device("L40S", 362, 183, 864, 48, 31.5),
        _device("RTX4090", 165, 82.6, 1008, 24, 31.5),
        _device("TPU-v5e", 197, 197, 819, 16, 200),
        _device("TPU-v5p", 459, 459, 2765, 95, 600),
        _device("TPU-v6e", 918, 918, 1640, 32, 448),
        # Measured on one core of an AMD EPYC (Zen 3): a 2048 matmul, and a matrix times a vector.
        _device("CPU-core", 0.095, 0.095, 25, 8, 10),
    )
}


@dataclass(frozen=True)
class Link:
    """Bytes/s in one direction; a disk is written by one side and then read by the other."""

    name: str
    bandwidth: float
    is_disk: bool = False

    def seconds(self, num_bytes: float) -> float:
        """From one pool of devices to another."""
        return num_bytes / self.bandwidth * (2 if self.is_disk else 1)


LINKS = {
    link.name: link
    for link in (
        Link("nvlink-4", 450 * GIGA),
        Link("nvlink-3", 300 * GIGA),
        Link("pcie-5", 63 * GIGA),
        Link("pcie-4", 31.5 * GIGA),
        Link("infiniband-ndr", 50 * GIGA),
        Link("infiniband-hdr", 25 * GIGA),
        Link("ethernet-100", 12.5 * GIGA),
        Link("ethernet-25", 3.125 * GIGA),
        Link("ethernet-10", 1.25 * GIGA),
        Link("nvme", 5 * GIGA, is_disk=True),
        Link("network-disk", 1 * GIGA, is_disk=True),
    )
}
"""x16 slots, one port; an NVMe drive's slower direction, writing; a network disk behind 10 GbE."""


def chosen_device(
    name: str | None,
    tera_flops: float | None,
    bandwidth_gb: float | None,
    memory_gb: float | None,
    link_gb: float | None,
) -> Device:
    """The device of that name with the given figures in place of its own; figures alone make one.

    MeshdialError for an unknown name, a figure that is not positive, or figures that are no whole.
    """
    given = {"--flops": tera_flops, "--bandwidth": bandwidth_gb, "--memory": memory_gb}
    for flag, value in {**given, "--inside": link_gb}.items():
        if value is not None and not value > 0:
            raise MeshdialError(f"{flag} is {value:g}, expected more than 0")
    if name is None and any(value is not None for value in given.values()):
        missing = [flag for flag, value in given.items() if value is None]
        if missing:
            raise MeshdialError(f"{missing[0]} is missing: without --device, all three are needed")
        device = Device("custom", 0, 0, 0, 0, LINKS["pcie-4"].bandwidth)
    else:
        device = _known_device(name or "H100")
    figures = {
        "bfloat16_flops": tera_flops and tera_flops * TERA,
        "float32_flops": tera_flops and tera_flops * TERA,
        "bandwidth": bandwidth_gb and bandwidth_gb * GIGA,
        "memory": memory_gb and memory_gb * GIGA,
        "link": link_gb and link_gb * GIGA,
    }
    return replace(device, **{key: value for key, value in figures.items() if value is not None})


def _known_device(name: str) -> Device:
    names = {known.lower(): known for known in DEVICES}
    if name.lower() not in names:
        raise MeshdialError(f"--device is {name!r}, expected one of {', '.join(DEVICES)}")
    return DEVICES[names[name.lower()]]


def chosen_links(settings: Sequence[str]) -> dict[str, Link]:
    """The links with `NAME=GB/s` of the command line set; a new name is one more interconnect."""
    links = dict(LINKS)
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            bandwidth = float(text)
        except ValueError:
            bandwidth = 0.0
        if not name or not 0 < bandwidth < float("inf"):
            raise MeshdialError(f"--link is {setting!r}, expected NAME=GB/s, such as nvme=3.5")
        links[name] = replace(links.get(name, Link(name, 1.0)), bandwidth=bandwidth * GIGA)
    return links


def link_named(links: dict[str, Link], name: str, flag: str) -> Link:
    """MeshdialError if there is no such link."""
    if name not in links:
        raise MeshdialError(f"{flag} is {name!r}, expected one of {', '.join(links)}")
    return links[name]
