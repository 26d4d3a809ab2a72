#!/bin/sh
# The init process (pid 1) of one lab machine: sets up its hostname, hosts file and disks, then runs its services.
# usage: machine.sh DIR HOSTNAME SHARED    DIR/services holds a script for each service, which writes to DIR/SERVICE.log
#
# Started in fresh mount, UTS, IPC and PID namespaces, and in the machine's network namespace. When this process is
# killed, the kernel kills everything in the machine: engine, containerd, shims and containers, daemons and their children.
set -eu
dir=$1 name=$2 shared=$3
mount -t proc proc /proc
hostname "$name"
mount --bind "$dir/hosts" /etc/hosts

# Hides the host's daemons. Empty after each boot, so there are no stale pid files.
mount -t tmpfs -o mode=755 tmpfs /run

if [ -e "$dir/services/engine" ]; then
    # The engine's settings, key and certificates are separate from the host's and survive a reboot.
    mkdir -p /etc/docker
    mount --bind "$dir/etc" /etc/docker

    # Containers get this node's share of the cores (cpu_share.py).
    if runc=$(command -v runc); then
        : >/run/runc-of-this-machine
        mount --bind "$runc" /run/runc-of-this-machine
        mount --bind "$dir/../runc" "$runc"
    fi

    # containerd always creates /opt/containerd. If the kernel has no overlay, one empty folder is left behind.
    mkdir -p /run/opt/upper /run/opt/work
    mount -t overlay -o lowerdir=/opt,upperdir=/run/opt/upper,workdir=/run/opt/work overlay /opt 2>/dev/null || :
fi

mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/shared /mnt/own
mount --bind "$shared" /mnt/shared
mount --bind "$dir/own" /mnt/own

engine=
for service in "$dir"/services/*; do
    sh "$service" >>"$dir/${service##*/}.log" 2>&1 &
    if [ "${service##*/}" = engine ]; then engine=$!; fi
done

# Not `exec`: pid 1 must also reap the orphans that containers and shims leave. A machine exits with its engine or, without one,
# with the last of its services.
wait $engine
