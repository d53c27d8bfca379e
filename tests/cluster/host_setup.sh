#!/bin/bash
# Stage one of a host: PID 1 of fresh mount, UTS, IPC, network and PID namespaces that still sees the machine's files.
# It says its pid on stdout, puts the host's file system together, waits for a line on stdin that says that the network
# is there, and becomes host_init.py inside the new root.
# usage: host_setup.sh HOST LOWER DISK SHARED CHECKOUT IMAGES VENV [CGROUP]
set -euo pipefail
host=$1 lower=$2 disk=$3 shared=$4 checkout=$5 images=$6 venv=$7 cgroup=${8:-}
root=$disk/root

# /proc is still the machine's here, so this is the pid by which the machine knows this process.
read -r machine_pid _ < /proc/self/stat
echo "$machine_pid"

hostname "$host"
echo "0 2147483647" > /proc/sys/net/ipv4/ping_group_range # everyone may ping, as systemd has it
mount -t overlay -o "lowerdir=$lower,upperdir=$disk/upper,workdir=$disk/work" overlay "$root"

mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t sysfs -o nosuid,nodev,noexec,ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/run"

if [[ -n $cgroup ]]; then # groups of the host's own, version 1
    mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
    for controller in freezer memory cpuset; do
        own=/sys/fs/cgroup/$controller/$cgroup
        mkdir -p "$own" "$root/sys/fs/cgroup/$controller"
        if [[ $controller == cpuset ]]; then # a new group may use nothing
            for file in cpuset.cpus cpuset.mems; do
                for folder in "${own%/*}" "$own"; do cat "/sys/fs/cgroup/cpuset/$file" >"$folder/$file"; done
            done
        fi
        mount --bind "$own" "$root/sys/fs/cgroup/$controller"
    done
fi

mount -t tmpfs -o mode=755,nosuid tmpfs "$root/dev"
make_device() { mknod -m 666 "$root/dev/$1" c "$2" "$3"; }
make_device null 1 3
make_device zero 1 5
make_device full 1 7
make_device random 1 8
make_device urandom 1 9
make_device tty 5 0
make_device fuse 10 229 # squashfuse runs as the user
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/0 "$root/dev/stdin"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"
make_device fakegpu0 1 3 # another null: Slurm sets CUDA_VISIBLE_DEVICES for devices only, not for plain files
make_device fakegpu1 1 3

read_only_bind() {
    mkdir -p "$2"
    mount --bind "$1" "$2"
    mount -o remount,bind,ro "$2"
}
mount --bind "$shared/home" "$root/home"
mkdir -p "$root/scratch"
mount --bind "$shared/scratch" "$root/scratch"
read_only_bind "$shared/slurm" "$root/etc/slurm"
read_only_bind "$checkout" "$root/opt/slurmddp"
read_only_bind "$venv" "$root/opt/slurmddp-venv"
read_only_bind "$images" "$root/opt/images"
cp "$shared/hosts" "$root/etc/hosts"
echo "$host" > "$root/etc/hostname"
: > "$root/etc/resolv.conf"
cp "$shared/munge.key" "$root/etc/munge/munge.key"
chroot "$root" /bin/sh -c 'chown munge:munge /etc/munge/munge.key && chmod 0400 /etc/munge/munge.key'

read -r _
# Not chroot: in a chroot the kernel refuses user namespaces, and Apptainer needs them.
cd "$root"
pivot_root . .
hash -r
umount -l .
cd /
exec /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin LANG=C.UTF-8 \
    /usr/bin/python3 -I /opt/slurmddp/tests/cluster/host_init.py "$host" < /dev/null > /var/log/host.log 2>&1
