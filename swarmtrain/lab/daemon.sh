#!/bin/sh
# Writes down who it is, then becomes the program it was given: a process that any later command can find again.
# usage: daemon.sh PIDFILE PROGRAM [ARG…]
#
# The record is the process's own line of /proc/self/stat: its pid, and its start time, which tells it from a later
# process that was given the same pid. /proc is still the host's here, so the pid is the host's too.
set -eu
record=$1
shift
read -r line </proc/self/stat
echo "$line" >"$record.new"
mv "$record.new" "$record"
exec "$@"
