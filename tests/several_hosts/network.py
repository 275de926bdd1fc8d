"""Hosts on one machine: network namespaces whose packets pass through a switch in this process.

    namespace of a host ── tun device ──► switch: delay, loss, cut per direction ──► another host

Kernels are often built without `netem`, so the switch does its work: it forwards the packets of the
hosts and delays or drops them. The TCP of both ends is that of the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import struct
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["CUT", "Host", "Impairment", "Network"]

_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_MAX_PACKET_BYTES = 2**16
_MAX_DELAYED_PACKETS = 20_000
_NAMESPACES = Path("/run/netns")
_SUBNET = "10.88.0"


class Impairment(NamedTuple):
    """What happens to the packets of one direction."""

    delay_s: float = 0.0
    loss: float = 0.0
    """Probability that a packet is dropped."""


CUT = Impairment(loss=1.0)


@dataclass(frozen=True)
class Host:
    """A network namespace with one address."""

    name: str
    address: str

    def command(self, command: list[str]) -> list[str]:
        """Return the command line that runs a command on this host."""
        return ["ip", "netns", "exec", self.name, *command]


class Network:
    """The hosts and the switch between them, which is a thread of this process.

    The caller is in a mount and a network namespace of its own, which end with it.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="switch", daemon=True)
        self._devices: dict[bytes, int] = {}
        """Address of a host → file of its device."""
        self._impairments: dict[tuple[bytes, bytes], Impairment] = {}
        """(source, destination) → what happens to the packets."""
        self._num_delayed = 0
        _NAMESPACES.mkdir(exist_ok=True)  # as the first `ip netns add` of a machine does
        subprocess.run(["mount", "-t", "tmpfs", "netns", str(_NAMESPACES)], check=True)
        self._thread.start()

    def add_host(self, name: str) -> Host:
        """Create a namespace with a loopback device and an address in the network."""
        number = len(self._devices) + 1
        host = Host(name, f"{_SUBNET}.{number}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        name_of_device = f"tun{number}"
        request = struct.pack("16sH22x", name_of_device.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, request)
        for arguments in (
            f"netns add {name}",
            f"link set {name_of_device} netns {name}",
            f"-n {name} link set lo up",
            f"-n {name} address add {host.address}/24 dev {name_of_device}",
            f"-n {name} link set {name_of_device} up",
        ):
            subprocess.run(["ip", *arguments.split()], check=True)
        self._devices[_packed(host.address)] = device
        self._loop.call_soon_threadsafe(self._loop.add_reader, device, self._forward, device)
        return host

    def impair(self, source: Host, destination: Host, impairment: Impairment) -> None:
        """Change what happens to packets from one host to another."""
        self._impairments[_packed(source.address), _packed(destination.address)] = impairment

    def impair_both_ways(self, one: Host, other: Host, impairment: Impairment) -> None:
        self.impair(one, other, impairment)
        self.impair(other, one, impairment)

    def heal(self) -> None:
        """Forward every packet again."""
        self._impairments.clear()

    def close(self) -> None:
        """End the switch; the namespaces end with the program."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for device in self._devices.values():
            os.close(device)

    def _forward(self, device: int) -> None:
        try:
            packet = os.read(device, _MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        if packet[0] >> 4 != 4:
            return
        source, destination = packet[12:16], packet[16:20]
        target = self._devices.get(destination)
        if target is None:
            return
        impairment = self._impairments.get((source, destination))
        if impairment is None:
            _write(target, packet)
        elif self._rng.random() >= impairment.loss and self._num_delayed < _MAX_DELAYED_PACKETS:
            self._num_delayed += 1
            self._loop.call_later(impairment.delay_s, self._deliver, target, packet)

    def _deliver(self, target: int, packet: bytes) -> None:
        self._num_delayed -= 1
        _write(target, packet)


def _packed(address: str) -> bytes:
    return bytes(int(part) for part in address.split("."))


def _write(device: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # a full queue drops packets, as a real one does
        os.write(device, packet)
