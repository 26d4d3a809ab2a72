#!/bin/sh
# Download the Docker engine of the next Debian release into a directory. The installed engine is not changed.
# Usage: newer-engine.sh DIR, then swarmtrain lab up --engine DIR/bin. Can be repeated. Needs apt on Debian 12. The installed runc is used.
set -eu
release=trixie
dir=$1
[ -x "$dir/bin/dockerd" ] && exit 0
site=$(apt-get indextargets --format '$(SITE)' 2>/dev/null | head -n 1)
[ -n "$site" ] || { echo "apt has no package index" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/packages" "$work/bin"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site $release main" >"$work/sources.list"
apt_get() {
    apt-get -q -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$work/lists" \
        -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root "$@" >&2
}
echo "downloading the engine of Debian $release" >&2
apt_get update
(cd "$work/packages" && apt_get download docker.io containerd)
for package in "$work"/packages/*.deb; do
    dpkg-deb -x "$package" "$work/system"
done
find "$work/system/usr/bin" "$work/system/usr/sbin" "$work/system/usr/libexec" -type f -perm -u+x -exec mv -t "$work/bin" {} + 2>/dev/null || true
[ -x "$work/bin/dockerd" ]
mkdir -p "$dir"
rm -rf "$dir/bin"
mv "$work/bin" "$dir/bin"
