"""The interface that collectives bind to."""

from __future__ import annotations

import pytest

from megaverl.errors import UserError
from megaverl.parallel.network import local_addresses, variables

INTERFACES = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "ib0": ["10.1.0.4", "fe80::1"]}


def test_the_interface_that_carries_rays_address_is_taken():
    assert variables("10.1.0.4", INTERFACES, {}) == {
        "VLLM_HOST_IP": "10.1.0.4",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
    }


def test_what_the_node_says_itself_stays():
    given = {"NCCL_SOCKET_IFNAME": "ib", "VLLM_HOST_IP": "10.9.9.9"}
    assert variables("10.1.0.4", INTERFACES, given) == {"GLOO_SOCKET_IFNAME": "ib0"}
    given = {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "eth0"}
    assert variables("8.8.8.8", INTERFACES, given) == {"VLLM_HOST_IP": "8.8.8.8"}


def test_an_address_that_no_interface_carries_is_refused_with_those_there_are():
    with pytest.raises(UserError, match=r"knows this node as 8\.8\.8\.8.*ib0 10\.1\.0\.4.*\n.*--node-ip-address"):
        variables("8.8.8.8", INTERFACES, {})


def test_this_machine_has_a_loopback_interface():
    assert any("127.0.0.1" in addresses for addresses in local_addresses().values())
