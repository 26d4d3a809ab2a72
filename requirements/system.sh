#!/bin/sh
# Install the Debian packages that the lab and its tests need, if possible (as root, with apt). Can be repeated.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
missing=""
for pair in dockerd:docker.io docker-registry:docker-registry mmdebstrap:mmdebstrap ip:iproute2 iptables:iptables sshd:openssh-server \
    pdsh:pdsh slurmctld:slurmctld slurmd:slurmd munged:munge sbatch:slurm-client faketime:faketime gcc:build-essential \
    mpirun.openmpi:openmpi-bin mpiexec.mpich:mpich chromium:chromium; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair##*:}"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "The lab needs$missing, which only root can install: apt-get install -y$missing" >&2
    exit 0
fi
echo "Installing$missing" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >&2
# shellcheck disable=SC2086  # a list of packages
apt-get install -y -q --no-install-recommends $missing >&2
