#!/bin/sh
# The init process (pid 1) of one lab machine: gives it a name, a hosts file and disks of its own, then runs the engine.
# usage: machine.sh DIR HOSTNAME SHARED FLAG…    the flags are the engine's; its file /etc/docker/daemon.json is the machine's own
#
# Started in fresh mount, UTS, IPC and PID namespaces, and in the machine's network namespace. When this process is
# killed, the kernel kills all that runs in the machine: engine, containerd, shims and containers.
set -eu
dir=$1 name=$2 shared=$3
shift 3
mount -t proc proc /proc
hostname "$name"
mount --bind "$dir/hosts" /etc/hosts

# Hides the host's own dockerd and containerd, and is empty after every boot: no stale pid files.
mount -t tmpfs -o mode=755 tmpfs /run

# The engine's settings, key and certificates survive a reboot, and are not the host's.
mkdir -p /etc/docker
mount --bind "$dir/etc" /etc/docker

# containerd insists on making /opt/containerd. Where the kernel has no overlay, one empty folder stays behind.
mkdir -p /run/opt/upper /run/opt/work
mount -t overlay -o lowerdir=/opt,upperdir=/run/opt/upper,workdir=/run/opt/work overlay /opt 2>/dev/null || :

mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/shared
mount --bind "$shared" /mnt/shared

# A clean environment: a proxy set for the user's shell would swallow the way to the lab's registry.
env -i PATH="$PATH" HOME=/root dockerd "$@" &

# Not `exec`: pid 1 must also reap the orphans that containers and shims leave.
wait $!
