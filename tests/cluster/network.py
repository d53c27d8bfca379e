"""The cluster's network: a namespace of its own with one bridge, and a veth pair from it into each host.

Nothing of it is in the machine's own network, so any number of clusters may use the same names and addresses,
and all of it goes away with the process that holds the namespace.
"""

import subprocess

from .errors import ClusterError, ClusterUnavailable

BRIDGE = "br0"
BRIDGE_ADDRESS = "10.77.0.1"
HOST_INTERFACE = "ib0"  # as on a real site, where the default interface is not the right one to train on
PREFIX_LENGTH = 24


def link_name(host: str) -> str:
    """The bridge's end of a host's veth pair."""
    return f"v-{host}"


def run_ip(namespace_pid: int, *commands: str) -> None:
    """Run `ip` commands, one a line, in the network namespace of a process."""
    done = subprocess.run(
        ["nsenter", "--target", str(namespace_pid), "--net", "ip", "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise ClusterError(f"ip failed ({'; '.join(commands)}): {done.stderr.strip()}")


def make_bridge(fabric: int) -> None:
    """The bridge that all hosts hang on; its address serves a test's own servers in the fabric."""
    run_ip(
        fabric,
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"link set {BRIDGE} up",
        f"address add {BRIDGE_ADDRESS}/{PREFIX_LENGTH} dev {BRIDGE}",
    )


def connect(fabric: int, host: str, init: int, address: str) -> None:
    """Give a host its interface and address. There is no default route: hosts see only each other."""
    link = link_name(host)
    run_ip(
        fabric,
        f"link add {link} type veth peer name {HOST_INTERFACE} netns {init}",
        f"link set {link} master {BRIDGE} up",
    )
    run_ip(
        init,
        "link set lo up",
        f"address add {address}/{PREFIX_LENGTH} dev {HOST_INTERFACE}",
        f"link set {HOST_INTERFACE} up",
    )


def disconnect(fabric: int, host: str) -> None:
    """Remove a dead host's veth pair at once, rather than when the kernel gets to its namespace."""
    try:
        run_ip(fabric, f"link delete {link_name(host)}")
    except ClusterError:
        if has_link(fabric, host):  # else the kernel was quicker
            raise


def has_link(fabric: int, host: str) -> bool:
    """True while the bridge's end of the host's pair is there."""
    command = ["nsenter", "--target", str(fabric), "--net", "ip", "link", "show", link_name(host)]
    return subprocess.run(command, capture_output=True).returncode == 0


def set_link(fabric: int, host: str, up: bool) -> None:
    """Cut or mend a host's cable."""
    run_ip(fabric, f"link set {link_name(host)} {'up' if up else 'down'}")


def drop(init: int, address: str) -> None:
    """Let a host drop what it sends to an address; an address that it drops already stays so."""
    run_ip(init, f"route replace blackhole {address}")


def drop_nothing(init: int) -> None:
    """Undo every `drop` on a host."""
    run_ip(init, "route flush table main type blackhole")


def shape(fabric: int, host: str, rules: str) -> None:
    """Put a queueing discipline (tc's words, `netem delay 100ms`) on the way to a host; "" for none."""
    base = ["nsenter", "--target", str(fabric), "--net", "tc", "qdisc"]
    link = ["dev", link_name(host), "root"]
    subprocess.run([*base, "delete", *link], capture_output=True)  # fails where there is none, which is as good
    if not rules:
        return
    done = subprocess.run([*base, "add", *link, *rules.split()], capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterUnavailable(f"this kernel cannot do `tc qdisc add {rules}`: {done.stderr.strip()}")
