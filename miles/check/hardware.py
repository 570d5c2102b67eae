"""The machines that a run is checked for: a table of the makers' data sheets, or the GPUs of this machine."""

from dataclasses import dataclass, replace

from miles.utils.errors import UserError


@dataclass(frozen=True)
class Hardware:
    """One GPU and its share of a node. Rates are one way, of one GPU; bytes and operations a second.

    Args:
        name: as --check-hardware takes it.
        memory: bytes of the GPU that processes can have: less than what is printed on it.
        host_memory: bytes of a node's memory.
        host_link: between a GPU and pinned host memory.
        nvlink: between GPUs of a node.
        network: between nodes, a GPU's share.
        flops: bf16 operations of matrix products, without sparsity.
        bandwidth: of the GPU's own memory.
    """

    name: str
    memory: float
    host_memory: float
    host_link: float
    nvlink: float
    network: float
    flops: float
    bandwidth: float


# The makers' data sheets; of memory what the driver leaves (measured of the H200), of host links what a pinned copy
# reaches: 55 GB/s over PCIe 5 is measured (benchmarks/results/sleep_wake.json), the others are estimates. Host memory
# is that of a usual node.
HARDWARE = {
    "A100": Hardware("A100", 84.9e9, 1e12, 25e9, 300e9, 25e9, 312e12, 2.0e12),
    "H100": Hardware("H100", 84.9e9, 2e12, 55e9, 450e9, 50e9, 989e12, 3.35e12),
    "H200": Hardware("H200", 150.0e9, 2e12, 55e9, 450e9, 50e9, 989e12, 4.8e12),
    "B200": Hardware("B200", 191.5e9, 2e12, 55e9, 900e9, 50e9, 2250e12, 8.0e12),
    "B300": Hardware("B300", 296.0e9, 2e12, 55e9, 900e9, 100e9, 2250e12, 8.0e12),
    "GB200": Hardware("GB200", 191.5e9, 0.96e12, 350e9, 900e9, 50e9, 2500e12, 8.0e12),
    "GB300": Hardware("GB300", 296.0e9, 0.96e12, 350e9, 900e9, 100e9, 2500e12, 8.0e12),
}


def hardware_named(name: str | None) -> Hardware:
    """A row of the table, or, without a name, this machine: its GPU's kind and memory, and its host's memory.

    Raises:
        UserError: the name is not in the table, or this machine has no GPU that is.
    """
    known = ", ".join(HARDWARE)
    if name is not None:
        if name not in HARDWARE:
            raise UserError(f"--check-hardware {name} is unknown; known: {known}")
        return HARDWARE[name]
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"--check finds no GPU here; name the one that the run is for: --check-hardware {known}")
    kind, (_, memory) = torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)
    # The longest name that fits: GB300 is no B300.
    row = next((HARDWARE[key] for key in sorted(HARDWARE, key=len, reverse=True) if key in kind), None)
    if row is None:
        raise UserError(f"--check does not know this machine's {kind}; name the nearest: --check-hardware {known}")
    import psutil

    return replace(row, memory=float(memory), host_memory=float(psutil.virtual_memory().total))
