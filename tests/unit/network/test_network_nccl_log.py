# ruff: noqa: E501 - the lines of the logs are as long as they are
"""Which network NCCL chose: lines of real logs, each with the address of the thread or page that has them."""

import json
from dataclasses import asdict
from typing import NamedTuple

import pytest

from slurmddp.runtime.network.nccl_log import Transport, from_json, merge, read, short


class Sample(NamedTuple):
    """Lines of one rank's log, and what they tell."""

    source: str
    lines: str
    text: str
    version: str = ""
    tcp: bool = False
    gpudirect: bool | None = None
    reasons: tuple[str, ...] = ()


SAMPLES = {
    "2.4.7 InfiniBand": Sample(
        "https://github.com/Mellanox/nv_peer_memory/issues/56",
        """master_node:20:289 [0] NCCL INFO NET/Socket : Using [0]ib0:192.168.11.1<0>
master_node:20:289 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).
master_node:20:289 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 0.
master_node:20:289 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:192.168.11.1<0>
NCCL version 2.4.7+cuda10.0""",
        "IB mlx5_0",
        "2.4.7",
        reasons=("NCCL found no network plugin",),
    ),
    "2.4.8 sockets": Sample(
        "a training log in a public repository: node01, two nodes",
        """node01:2771:2771 [0] NCCL INFO Bootstrap : Using [0]eno1:192.168.50.11<0>
node01:2771:2771 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]
node01:2771:2771 [0] NCCL INFO NET/Socket : Using [0]eno1:192.168.50.11<0>
NCCL version 2.4.8+cuda10.0
node01:2771:2801 [0] NCCL INFO Ring 00 : 1 -> 0 [receive] via NET/Socket/0
node01:2771:2801 [0] NCCL INFO NET/Socket: Using 1 threads and 1 sockets per thread
node01:2771:2801 [0] NCCL INFO Ring 00 : 0 -> 1 [send] via NET/Socket/0""",
        "Socket eno1",
        "2.4.8",
        tcp=True,
        gpudirect=False,
        reasons=("libibverbs is missing",),
    ),
    "2.5.6 InfiniBand, five adapters": Sample(
        "https://github.com/NVIDIA/nccl/issues/302",
        "crow:5330:5330 [3] NCCL INFO NET/IB : Using [0]mlx5_1:1/IB [1]mlx5_3:1/IB [2]mlx5_0:1/IB [3]mlx5_2:1/RoCE "
        "[4]mlx5_4:1/IB ; OOB eth0:10.100.62.64<0>",
        "IB mlx5_0..4",
    ),
    "2.8 GPUDirect, four of the adapters": Sample(
        "https://github.com/NVIDIA/nccl/issues/707",
        """10-90-43-152:120890:121560 [0] NCCL INFO Channel 01 : 2[c7000] -> 0[87000] [receive] via NET/IB/5/GDRDMA
10-90-43-152:120890:121563 [3] NCCL INFO Channel 01 : 3[ca000] -> 2[c7000] [send] via NET/IB/2/GDRDMA""",
        "IB",
        gpudirect=True,
    ),
    "2.11.4 sockets, by NCCL_NET": Sample(
        "https://github.com/NVIDIA/nccl/issues/676",
        """gpu01:124172:124172 [0] NCCL INFO Bootstrap : Using enp225s0f1:10.10.10.2<0>
gpu01:124172:124172 [0] NCCL INFO NCCL_SOCKET_IFNAME set to en
gpu01:124172:124172 [0] NCCL INFO NET/Socket : Using [0]enp225s0f1:10.10.10.2<0>
gpu01:124172:124172 [0] NCCL INFO Using network Socket
NCCL version 2.11.4+cuda11.4""",
        "Socket enp225s0f1",
        "2.11.4",
        tcp=True,
    ),
    "2.12.7 EFA": Sample(
        "a log of nccl-tests in a public repository: test-nccl-efa-worker",
        """[1,0]<stdout>:test-nccl-efa-worker-0:21:21 [0] NCCL INFO Bootstrap : Using eth0:10.11.13.106<0>
[1,0]<stdout>:test-nccl-efa-worker-0:21:21 [0] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v5 symbol.
[1,0]<stdout>:test-nccl-efa-worker-0:21:21 [0] NCCL INFO NET/OFI Using aws-ofi-nccl 1.5.0aws
[1,0]<stdout>:test-nccl-efa-worker-0:21:21 [0] NCCL INFO NET/OFI Selected Provider is efa (found 1 nics)
[1,0]<stdout>:test-nccl-efa-worker-0:21:21 [0] NCCL INFO Using network AWS Libfabric
[1,0]<stdout>:NCCL version 2.12.7+cuda11.4
[1,1]<stdout>:test-nccl-efa-worker-1:21:26 [0] NCCL INFO Channel 00/0 : 0[35000] -> 1[f5000] [receive] via NET/AWS Libfabric/0""",
        "OFI efa without GPUDirect RDMA",
        "2.12.7",
        gpudirect=False,
    ),
    "2.18.5 RoCE": Sample(
        "https://github.com/NVIDIA/nccl/issues/1052",
        """node2:14159:14159 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared object file: No such file or directory
node2:14159:14159 [0] NCCL INFO NET/Plugin : No plugin found, using internal implementation
NCCL version 2.18.5+cuda12.0
node2:14159:14168 [0] NCCL INFO NCCL_IB_HCA set to mlx5_4
node2:14159:14168 [0] NCCL INFO NET/IB : Using [0]mlx5_4:1/RoCE [RO]; OOB enp24s0np0:10.10.10.1<0>
node2:14159:14168 [0] NCCL INFO Using network IB""",
        "IB (RoCE) mlx5_4",
        "2.18.5",
        reasons=("NCCL found no network plugin",),
    ),
    "2.18 sockets, by NCCL_IB_DISABLE": Sample(
        "https://github.com/NVIDIA/nccl-tests/issues/188",
        """user:852750:852802 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
user:852750:852802 [0] NCCL INFO NET/Socket : Using [0]ibs85f0:192.168.1.14<0> [1]ib0:192.168.1.15<0>
user:852750:852802 [0] NCCL INFO Using network Socket""",
        "Socket ib0 ibs85f0",
        tcp=True,
        reasons=("NCCL_IB_DISABLE set by environment to 1",),
    ),
    "2.19.3 RoCE, two adapters": Sample(
        "https://github.com/NVIDIA/nccl-tests/issues/185",
        """dgxh100-4:460770:460770 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or directory No plugin found (libnccl-net.so), using internal implementation
NCCL version 2.19.3+cuda12.3
dgxh100-4:460770:460842 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp220s0np0:11.1.128.136<0>
dgxh100-4:460770:460842 [0] NCCL INFO Using non-device net plugin version 0
dgxh100-4:460770:460842 [0] NCCL INFO Using network IB""",
        "IB (RoCE) mlx5_10,11",
        "2.19.3",
        reasons=("NCCL found no network plugin",),
    ),
    "2.20 SHARP plugin": Sample(
        "https://github.com/NVIDIA/nccl/issues/1357",
        """qh100-gpu20:39629:39686 [0] NCCL INFO P2P plugin IBext
qh100-gpu19:49357:49418 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP [2]mlx5_4:1/IB/SHARP [3]mlx5_5:1/IB/SHARP [RO]; OOB ibp25s0:10.20.0.119<0>
qh100-gpu19:49360:49416 [6] NCCL INFO Using network IBext""",
        "IBext mlx5_0,1,4,5",
    ),
    "2.21 merged adapters, the second pair carries data": Sample(
        "https://github.com/NVIDIA/nccl-tests/issues/373",
        """bigo:1884:2298 [0] NCCL INFO P2P plugin IBext_v8
bigo:1884:2298 [0] NCCL INFO NET/IB : Using [0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE} [1]={[2] mlx5_0:1/RoCE, [3] mlx5_1:1/RoCE} [RO]; OOB bond0.526:169.136.106.9<0>
bigo:1884:2298 [0] NCCL INFO Using network IBext_v8
bigo:1884:2298 [0] NCCL INFO Channel 00/0 : 1[0] -> 2[0] [receive] via NET/IBext_v8/1
bigo:1884:2298 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [send] via NET/IBext_v8/1""",
        "IBext_v8 (RoCE) mlx5_0,1 without GPUDirect RDMA",
        gpudirect=False,
    ),
    "2.22.3 no adapter": Sample(
        "a page on NCCL's examples in a public repository: ubuntu, HPC-X",
        """ubuntu:1482:1482 [0] NCCL INFO NCCL version 2.22.3+cuda12.5
ubuntu:1482:1482 [0] NCCL INFO P2P plugin IBext_v8
ubuntu:1482:1482 [0] NCCL INFO NET/IB : No device found.
ubuntu:1482:1482 [0] NCCL INFO NET/Socket : Using [0]eno1:172.22.116.89<0> [1]ztyou3pbk2:192.168.193.155<0>
ubuntu:1482:1482 [0] NCCL INFO Using network Socket""",
        "Socket eno1 ztyou3pbk2",
        "2.22.3",
        tcp=True,
        reasons=("NCCL found no InfiniBand or RoCE device",),
    ),
    "2.22.3 through another rank's adapter (PXN)": Sample(
        "a log in a public repository: tpgds-aihub0008",
        """tpgds-aihub0008:181412:181412 [1] NCCL INFO Channel 00/0 : 9[1] -> 0[0] [send] via NET/IB/0(8)/GDRDMA
tpgds-aihub0008:181411:181411 [0] NCCL INFO Channel 00/0 : 1[1] -> 8[0] [receive] via NET/IB/0/GDRDMA
tpgds-aihub0008:181413:181413 [2] NCCL INFO Channel 03/0 : 10[2] -> 9[1] via P2P/IPC""",
        "IB",
        gpudirect=True,
    ),
    "2.26 Tencent's plugin": Sample(
        "a log in a public repository: vm-host40",
        """vm-host40:34001:34043 [0] NCCL INFO NET/Plugin: Loaded net plugin NCCL RDMA Plugin v6 (v6)
vm-host40:34001:34043 [0] NCCL INFO P2P plugin IBext
vm-host40:34001:34043 [0] NCCL INFO NET/IB : Using [0]mlx5_bond_6:1/RoCE [1]mlx5_bond_7:1/RoCE [RO]; OOB bond0:30.159.184.22<0>
vm-host40:34001:34043 [0] NCCL INFO Using network NCCL RDMA Plugin v6""",
        "NCCL RDMA Plugin v6 (RoCE) mlx5_bond_6,7",
    ),
    "2.27 EFA, the plugin failed": Sample(
        "a log in a public repository: llama-3-8b-node-0-0",
        """[2025-12-28 16:04:25] llama-3-8b-node-0-0:152:386 [0] ncclResult_t nccl_net_ofi_init_v6(ncclDebugLogger_t):166 NCCL WARN NET/OFI Initializing plugin failed
llama-3-8b-node-0-0:152:386 [0] NCCL INFO NET/IB : No device found.
llama-3-8b-node-0-0:152:386 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.4.51<0>
llama-3-8b-node-0-0:152:386 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>
llama-3-8b-node-0-0:152:386 [0] NCCL INFO Initialized NET plugin Socket
llama-3-8b-node-0-0:152:386 [0] NCCL INFO Assigned NET plugin Socket to comm
llama-3-8b-node-0-0:152:386 [0] NCCL INFO Using network Socket""",
        "Socket eth0",
        tcp=True,
        reasons=("the plugin aws-ofi-nccl failed to start", "NCCL found no InfiniBand or RoCE device"),
    ),
    "2.27 EFA": Sample(
        "a log in a public repository: gpu-st-ml-1",
        """gpu-st-ml-1:78499:78499 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 1 nics)
gpu-st-ml-1:78499:78499 [0] NCCL INFO NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR
gpu-st-ml-2:77729:77729 [0] NCCL INFO Initialized NET plugin Libfabric
gpu-st-ml-2:77729:77729 [0] NCCL INFO Assigned NET plugin Libfabric to comm
gpu-st-ml-2:77729:77729 [0] NCCL INFO Using network Libfabric""",
        "OFI efa",
    ),
    "2.28 RoCE, virtual devices": Sample(
        "a log in a public repository: spark-fb97",
        """spark-fb97:23491:23491 [0] NCCL INFO NET/IB: [1] rocep1s0f1:uverbs1:1/RoCE provider=Mlx5 speed=200000 context=0xcba554388f70 pciPath=/sys/devices/pci0000:00/0000:00:00.0/0000:01:00.0 ar=0
spark-fb97:23491:23491 [0] NCCL INFO NET/IB : Made virtual device [0] name=rocep1s0f1 speed=200000 ndevs=1
spark-4440:24302:24302 [0] NCCL INFO NET/IB : Using [0]rocep1s0f1:1/RoCE [1]roceP2p1s0f1:1/RoCE [RO]; OOB enp1s0f1np1:192.168.100.16<0>
spark-4440:24302:24302 [0] NCCL INFO Initialized NET plugin IB
spark-4440:24302:24302 [0] NCCL INFO Assigned NET plugin IB to comm
spark-4440:24302:24302 [0] NCCL INFO Assigned GIN plugin GIN_IB_GDAKI to comm
spark-4440:24302:24302 [0] NCCL INFO Using network IB""",
        "IB (RoCE) roceP2p1s0f1 rocep1s0f1",
    ),
    "Slingshot": Sample(
        "https://github.com/determined-ai/environments/pull/169, and a channel of Frontier in a public repository",
        """nid000019:51404:52019 [0] NCCL INFO NET/OFI Selected Provider is cxi
frontier00061:695135:695311 [0] NCCL INFO Channel 03/0 : 0[d6000] -> 2[de000] via P2P/IPC comm 0x9bbf3b0 nRanks 4096
frontier00061:695135:695311 [0] NCCL INFO Channel 00/0 : 4092[d6000] -> 0[d6000] [receive] via NET/AWS Libfabric/2/GDRDMA comm 0x9bbf3b0 nRanks 4096""",
        "OFI cxi",
        gpudirect=True,
    ),
    "Slingshot, libfabric on TCP": Sample(
        "the line of a real log with the provider that its authors look for",
        """nid000019:51404:52019 [0] NCCL INFO NET/OFI Selected Provider is tcp;ofi_rxm (found 4 nics)
nid000019:51404:52019 [0] NCCL INFO Using network AWS Libfabric""",
        "OFI tcp;ofi_rxm",
        tcp=True,
    ),
    "GPUDirect-TCPXO": Sample(
        "a page on A3 Mega in a public repository",
        """NCCL INFO Using network FasTrak
NCCL INFO Initializing network FasTrak, version: 1.0.17""",
        "FasTrak",
    ),
    "Google's FastSocket": Sample(
        "https://github.com/stas00/ml-engineering (network/benchmarks)",
        "NCCL INFO NET/FastSocket : Using [0]ibs108:10.0.19.12<0> [1]ibs109:10.0.19.13<0> [2]ibs110:10.0.19.14<0>",
        "FastSocket ibs108..110",
        tcp=True,
    ),
    "RCCL without adapters": Sample(
        "a log in a public repository: macpro2019-01",
        """macpro2019-01:253809:253904 [0] NCCL INFO NET/Plugin: Could not find: librccl-net.so
macpro2019-01:253809:253904 [0] NCCL INFO Could not open libibverbs.so
macpro2019-01:253809:253904 [0] NCCL INFO NET/IB : No device found.
macpro2019-01:253809:253904 [0] NCCL INFO NET/IB : Using [RO]; OOB enp3s0:192.168.1.2<0>
macpro2019-01:253809:253904 [0] NCCL INFO NET/Socket : Using [0]enp3s0:192.168.1.2<0>
macpro2019-01:253809:253904 [0] NCCL INFO Using network Socket""",
        "Socket enp3s0",
        tcp=True,
        reasons=(
            "NCCL found no network plugin",
            "libibverbs is missing",
            "NCCL found no InfiniBand or RoCE device",
        ),
    ),
    "nothing": Sample("", "some other program's words", "an unknown network"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_network_is_read_from_a_real_log(name: str) -> None:
    sample = SAMPLES[name]
    found = read(sample.lines.splitlines())
    assert (found.text, found.version, found.is_tcp) == (sample.text, sample.version, sample.tcp)
    assert (found.gpudirect, found.reasons) == (sample.gpudirect, sample.reasons)
    assert from_json(json.loads(json.dumps(asdict(found)))) == found


def test_ranks_of_a_node_are_put_together() -> None:
    ranks = [Transport("IB", (f"mlx5_{number}",), "IB", gpudirect=number == 2) for number in (3, 0, 2, 1)]
    assert merge(ranks).text == "IB mlx5_0..3"
    assert merge(ranks).gpudirect
    tcp = Transport("Socket", ("eth0",), reasons=("libibverbs is missing",))
    assert merge([*ranks, tcp]) == merge([tcp]), "one rank on TCP slows all"
    assert merge([Transport(), *ranks]).name == "IB" and merge([]) == Transport()


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"), "mlx5_0..3"),
        (("mlx5_10", "mlx5_9"), "mlx5_9,10"),
        (("ib0", "eth0", "ib1"), "eth0 ib0,1"),
        (("lo",), "lo"),
        ((), ""),
    ],
)
def test_devices_are_shown_in_few_characters(devices: tuple[str, ...], text: str) -> None:
    assert short(devices) == text
