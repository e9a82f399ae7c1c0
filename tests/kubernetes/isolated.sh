#!/bin/sh
# Run a command in namespaces of its own: network, mounts and processes. What the command starts (nodes,
# containers, their mounts and networks) ends when it ends, however it ends. Needs root.
# usage: isolated.sh COMMAND...     The command finds DYNCTL_TEST_ISOLATED: a directory of its own. Where the
# machine does not permit namespaces, it finds the reason in DYNCTL_TEST_NOT_ISOLATED instead.
set -eu

control_groups() { # DIRECTORY [ACTION...]: those that are named after it
  name=${1##*/}
  shift
  find /sys/fs/cgroup -depth -type d -path "*/$name*" "$@" 2>/dev/null
}

# Control groups outlive their processes. Those of runs that were killed go too. What a signal ends may still
# write for a moment.
clean() {
  for state in /tmp/dynctl-kubernetes-*; do
    [ -d "$state" ] || continue
    [ -d "/proc/${state##*-}" ] && [ "${state##*-}" != $$ ] && continue
    for _ in 1 2 3 4 5 6 7 8 9 10; do
      control_groups "$state" -exec rmdir {} + || true
      if rm -rf "$state" 2>/dev/null && [ -z "$(control_groups "$state")" ]; then break; fi
      sleep 0.5
    done
  done
}

# The shell inside is process 1: it takes over what others leave. All ends with the shell outside, even if
# that is killed.
isolated() {
  setpriv --pdeathsig KILL unshare --net --mount --pid --fork --kill-child --mount-proc sh -euc '
    for folder in /run /var/log /var/lib; do mount -t tmpfs tmpfs $folder; done
    ip link set lo up
    for address in 10.250.0.1 10.88.254.1 10.88.254.2; do ip address add $address/32 dev lo; done
    "$@" || exit $?
  ' sh "$@"
}

if [ "$1" = --clean-after ]; then # PID: where that process cannot do it itself
  tail --pid="$2" -s 0.2 -f /dev/null
  clean
  exit
fi
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
clean
if ! refusal=$(isolated true 2>&1); then
  export DYNCTL_TEST_NOT_ISOLATED="$refusal"
  exec "$@"
fi
export DYNCTL_TEST_ISOLATED="/tmp/dynctl-kubernetes-$$"
mkdir -m 700 "$DYNCTL_TEST_ISOLATED"
setsid "$0" --clean-after $$ >/dev/null 2>&1 </dev/null &
isolated "$@"
