"""Which address and interface a worker's collectives use: those under which Ray knows its node.

Left alone, gloo asks what the name of the host resolves to, often 127.0.0.1, and NCCL takes the first interface that
is up, which may be a bridge of containers. Both work on one machine and hang or fail between two.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from megaverl.errors import Problem, UserError

GLOO, NCCL, VLLM = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"


def bind_to(address: str) -> None:
    """Has gloo, NCCL and vLLM of this process use the interface that carries ``address``.

    Must come before the first process group. Variables that are set on the node already stay as they are.

    Args:
        address: of this node as Ray sees it, an IP address.

    Raises:
        UserError: no interface of this machine carries the address.
    """
    os.environ.update(variables(address, local_addresses(), os.environ))


def variables(address: str, interfaces: Mapping[str, list[str]], given: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that bind to ``address``, without those that are ``given``.

    Args:
        interfaces: addresses by interface.

    Raises:
        UserError: no interface carries the address, and it is not given which one to use.
    """
    wanted = {VLLM: address}
    if GLOO not in given or NCCL not in given:
        name = next((name for name, addresses in interfaces.items() if address in addresses), None)
        if name is None:
            table = ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in interfaces.items())
            raise UserError(
                Problem(
                    f"Ray knows this node as {address}, and no interface of it has that address ({table})",
                    where="ray start",
                    fix=f"ray start --node-ip-address=ADDRESS with one of them, or set {GLOO} and {NCCL} on every node",
                )
            )
        wanted |= {GLOO: name, NCCL: f"={name}"}  # with "=" NCCL takes this name, not each one that begins so
    return {key: value for key, value in wanted.items() if key not in given}


def local_addresses() -> dict[str, list[str]]:
    """IP addresses of this machine by interface."""
    import socket

    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        if addresses:
            found[name] = addresses
    return found
