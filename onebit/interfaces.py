"""Network interfaces: what a machine has, which of them Gloo or NCCL will take, and whether that looks wrong."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOOPBACK, BRIDGE, WIRELESS, TUNNEL, WIRED = "loopback", "container bridge", "Wi-Fi", "tunnel", "wired"
ARPHRD_LOOPBACK, ARPHRD_NONE = 772, 65534  # /sys/class/net/*/type
SLOW_KINDS = (BRIDGE, WIRELESS, TUNNEL)
VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


@dataclass(frozen=True)
class Host:
    """What one worker sees of its machine.

    Attributes:
        name: that tells machines apart.
        backend: "gloo" or "nccl".
        wanted: the value of the backend's variable (`VARIABLES`); empty: not set.
        interfaces: kind by name, of those there are.
        address: what the machine's own name resolves to; empty: nothing.
    """

    name: str
    backend: str
    wanted: str
    interfaces: Mapping[str, str]
    address: str

    @property
    def variable(self) -> str:
        return VARIABLES[self.backend]

    @property
    def chosen(self) -> tuple[str, ...]:
        """The interfaces that the variable names, of those there are; all of its names that there are none of are in
        `missing`. Gloo takes exact names; NCCL takes prefixes, with = exact names and with ^ all others."""
        return tuple(name for name in self.interfaces if self._named(name))

    @property
    def missing(self) -> tuple[str, ...]:
        """What the variable names that this machine does not have."""
        words = [word for word in self.wanted.lstrip("^=").split(",") if word]
        if self.backend == "nccl" and self.wanted.startswith("^"):
            return ()
        return tuple(word for word in words if not any(self._matches(name, word) for name in self.interfaces))

    def _named(self, name: str) -> bool:
        words = [word for word in self.wanted.lstrip("^=").split(",") if word]
        found = any(self._matches(name, word) for word in words)
        return bool(words) and (not found if self.backend == "nccl" and self.wanted.startswith("^") else found)

    def _matches(self, name: str, word: str) -> bool:
        exact = self.backend == "gloo" or self.wanted.startswith("=")
        word = word.partition(":")[0]  # NCCL allows a port
        return name == word if exact else name.startswith(word)


def kind_of(name: str, link_type: int, wireless: bool) -> str:
    """The kind of an interface, by its name, and its type and whether it has a `wireless` folder in /sys/class/net."""
    if link_type == ARPHRD_LOOPBACK or name in ("lo", "lo0"):
        return LOOPBACK
    if name.startswith(("docker", "br-", "veth", "cni", "virbr", "podman", "lxc")):
        return BRIDGE
    if wireless or name.startswith("wl"):
        return WIRELESS
    if link_type == ARPHRD_NONE or name.startswith(("wg", "tun", "tap", "tailscale", "utun")):
        return TUNNEL
    return WIRED


def interfaces_here(root: Path = Path("/sys/class/net")) -> dict[str, str]:
    """Kind by name of this machine's interfaces; where there is no /sys, from their names alone."""
    if not root.is_dir():
        return {name: kind_of(name, 0, False) for _, name in socket.if_nameindex()}
    found = {}
    for folder in sorted(root.iterdir()):
        try:
            link_type = int((folder / "type").read_text())
        except (OSError, ValueError):
            if not folder.is_dir():  # such as bonding_masters
                continue
            link_type = 0
        found[folder.name] = kind_of(folder.name, link_type, (folder / "wireless").is_dir())
    return found


def this_host(name: str, backend: str) -> Host:
    """The machine of this process."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    return Host(name, backend, os.environ.get(VARIABLES[backend], ""), interfaces_here(), address)


def faults_of(host: Host, machines: int) -> list[tuple[str, str, str]]:
    """What looks wrong with the interfaces that a worker uses: mark, finding, advice.

    Args:
        host: the worker's machine.
        machines: how many machines the workers are on.
    """
    if host.missing:
        have = ", ".join(f"{name} ({kind})" for name, kind in host.interfaces.items())
        what = f"{host.variable} is {host.wanted!r}, and {host.name} has no interface {', '.join(host.missing)}"
        return [("wrong", f"{what}; it has {have}", f"set {host.variable} to one of these")]
    found = []
    if machines > 1:
        found += _between_machines(host)
    for name in host.chosen:
        kind = host.interfaces[name]
        if kind in SLOW_KINDS:
            found.append((
                "warning",
                f"{host.name} uses {name}, which looks like a {kind} interface ({host.variable} is {host.wanted!r})",
                f"set {host.variable} to a wired interface that the other machines reach, or measure it with "
                "`onebit probe`",
            ))  # fmt: skip
    return found


def _between_machines(host: Host) -> list[tuple[str, str, str]]:
    loops = [name for name in host.chosen if host.interfaces[name] == LOOPBACK]
    if loops and len(loops) == len(host.chosen):
        return [(
            "wrong",
            f"{host.name} uses {', '.join(loops)}, the loopback interface, and workers are on several machines",
            f"set {host.variable} to the interface that joins the machines",
        )]  # fmt: skip
    if host.wanted or host.backend != "gloo":
        return []
    advice = "set GLOO_SOCKET_IFNAME to the interface that joins the machines"
    if not host.address:
        return [("wrong", f"the name of {host.name} resolves to no address, and Gloo would use that one", advice)]
    if host.address.startswith("127."):
        return [("wrong", f"the name of {host.name} resolves to {host.address}, loopback, and Gloo uses that", advice)]
    return []


def seen(hosts: Sequence[Host]) -> str:
    """Which interfaces the workers use, in words."""
    words = []
    for host in {host.name: host for host in hosts}.values():
        if host.wanted:
            words.append(f"{host.name}: {', '.join(f'{n} ({host.interfaces[n]})' for n in host.chosen)}")
        else:
            words.append(f"{host.name}: {host.variable} not set, {host.backend} chooses (own address {host.address})")
    return "; ".join(words)
