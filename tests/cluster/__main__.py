"""python -m tests.cluster build|up|down|status|run|shell|prune"""

import argparse
import os
import shlex
import sys

from .build import build, is_built, prune, wanted
from .cluster import Cluster, instances
from .errors import ClusterError
from .host import ADDRESSES
from .images import make_torch_image


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description="The Slurm test cluster.")
    parser.add_argument("--name", default="default", help="the instance (default: %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build what the cluster is made of, where it is not in the cache")
    up = commands.add_parser("up", help="build if needed, and start")
    up.add_argument("--accounting", action="store_true", help="with slurmdbd and its database, so that sacct works")
    commands.add_parser("down", help="stop, and remove all that it left")
    commands.add_parser("status", help="instances, hosts, nodes, jobs")
    commands.add_parser("prune", help="remove cached parts that nothing uses")
    shell = commands.add_parser("shell", help="a login shell on a host")
    run = commands.add_parser("run", help="a command on a host")
    for each in (shell, run):
        each.add_argument("--user", default="alice")
    shell.add_argument("host", nargs="?", default="login", choices=ADDRESSES)
    run.add_argument("host", choices=ADDRESSES)
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND...")
    return parser.parse_args()


def show_status() -> None:
    parts = wanted()
    print("built" if is_built(parts) else "not built", *(f"  {path}" for path in parts.folders()), sep="\n")
    for cluster in instances():
        print(f"cluster {cluster.name}: {'up' if cluster.is_up() else 'dead'} in {cluster.layout.folder}")
        if cluster.is_up():
            for name in cluster.hosts:
                print(f"  {name:6} {ADDRESSES[name]:12} {'up' if cluster.host_is_up(name) else 'down'}")
            print(cluster.sh("login", "sinfo; squeue", check=False, timeout=20).stdout)


def enter(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Become the command on the host."""
    if arguments.command == "run":
        argv = arguments.argv
    elif sys.stdin.isatty():
        # A terminal of the host's own: this one's device does not exist in there.
        argv = ["script", "--quiet", "--command", "bash -l", "/dev/null"]
    else:
        argv = ["bash", "-l"]
    env = {"TERM": os.environ.get("TERM", "dumb")}
    command = cluster.entry(arguments.host, argv, user=arguments.user, env=env)
    sys.stdout.flush()
    os.execvp(command[0], command)


def main() -> int:
    arguments = parse_arguments()
    cluster = Cluster(arguments.name)
    if arguments.command == "build":
        build(report=print)
    elif arguments.command == "up":
        if cluster.is_up():
            print(f"the cluster {cluster.name} is up already")
        else:
            cluster.accounting = arguments.accounting
            cluster.up(report=print)
            print(f"an image with torch, the default of site testcluster: {make_torch_image(cluster)}")
            prefix = shlex.join([sys.executable, "-m", "tests.cluster"])
            print(f"the cluster {cluster.name} is up: {prefix} shell [{'|'.join(cluster.hosts)}]")
    elif arguments.command == "down":
        cluster.down()
    elif arguments.command == "status":
        show_status()
    elif arguments.command == "prune":
        prune([each.state().parts for each in instances()], report=print)
    else:
        enter(cluster, arguments)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        sys.exit(f"error: {error}")
