#!/bin/sh
# Records its own identity, then executes the given program, so that any later command can find the process.
# usage: daemon.sh PIDFILE PROGRAM [ARG…]
#
# The record is the process's own line of /proc/self/stat: its pid, and its start time, which distinguishes it from a
# later process with the same pid. /proc is still the host's at this point, so the pid is the host's too.
set -eu
record=$1
shift
read -r line </proc/self/stat
echo "$line" >"$record.new"
mv "$record.new" "$record"
exec "$@"
