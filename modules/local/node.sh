#!/bin/sh
# One local node, driven by Terraform. What it needs comes in the environment, so that nothing has to be quoted:
#   node.sh secret   FOLDER SECRET                       keep the fleet secret in FOLDER
#   node.sh forget   FOLDER                              remove it, and FOLDER where nothing else is left
#   node.sh state    FOLDER                              make FOLDER, for what outlives a head that is replaced
#   node.sh up       FOLDER CONFIGURATION RUNNER WAIT    start the node, or let the running one take the configuration over;
#                    [STATE]                             of the head, with the state in STATE
#   node.sh down     FOLDER                              stop the node and remove its folder
#   node.sh template FOLDER CONFIGURATION                keep the configuration of the nodes that the head starts
#   node.sh end_group FOLDER NAME                        stop these nodes, and remove their folders
set -eu
umask 077

fail() {
  echo "skyinfra: $1" >&2
  exit 1
}

# The parents of a folder, removed as far as they are empty: pool, stack, root.
remove_empty() {
  rmdir "$1" 2>/dev/null && rmdir "$(dirname "$1")" 2>/dev/null && rmdir "$(dirname "$(dirname "$1")")" 2>/dev/null || true
}

write() {
  printf '%s' "$2" >"$1.new" && mv -f "$1.new" "$1" || fail "$1 cannot be written: is the disk full, or the folder not yours?"
}

make_folder() {
  mkdir -p "$1" || fail "the folder $1 cannot be made: is the disk full, or its parent not yours?"
}

secret() {
  make_folder "$FOLDER"
  write "$FOLDER/secret" "$SECRET"
}

forget() {
  rm -f "$FOLDER/secret" "$FOLDER/secret.new"
  remove_empty "$FOLDER"
}

# The state of a head: its jobs and the files that they need. The node's own folder has links to them.
parts='jobs kept'

state() {
  for part in $parts; do
    make_folder "$FOLDER/$part"
  done
}

# Moves the state to $2 that a head of an earlier version has in its own folder $1.
take_over() {
  for part in $parts; do
    if [ -d "$1/$part" ] && [ ! -L "$1/$part" ]; then
      rmdir "$2/$part" 2>/dev/null || true
      [ -e "$2/$part" ] || mv "$1/$part" "$2/$part"
    fi
  done
}

# Gives the head in the folder $1 the state in $2, and the port of the head before it, by which clients know the fleet.
give_state() {
  make_folder "$2"
  serves "$1" || take_over "$1" "$2"
  for part in $parts; do
    if [ ! -e "$1/$part" ]; then
      make_folder "$2/$part"
      ln -sfn "../head/$part" "$1/$part" || fail "the link $1/$part cannot be made"
    fi
  done
  if [ -e "$2/scheduler" ] && [ ! -e "$1/scheduler" ]; then
    mv -f "$2/scheduler" "$1/scheduler"
  fi
}

up() {
  runner=${SKYINFRA_RUNNER:-$RUNNER}
  command -v "$runner" >/dev/null 2>&1 || fail "the program $runner was not found. Activate the environment skyinfra is installed in, or set SKYINFRA_RUNNER to the path of its skyinfra-runner."
  make_folder "$FOLDER"
  # Terraform may reach the folder through "..", and `down` finds the runner by the folder's one true name.
  folder=$(cd "$FOLDER" && pwd -P)
  [ -z "${STATE-}" ] || give_state "$folder" "$STATE"
  write "$folder/node.json" "$CONFIGURATION"
  exec "$runner" boot --config "$folder/node.json" --detach --restart --wait "$WAIT"
}

# Whether process $1 is the runner of the folder $2, or its watchdog, so that a reused process id is never killed. The full path stands on
# the runner's command line.
is_runner() {
  if [ -r "/proc/$1/cmdline" ]; then
    tr '\0' ' ' <"/proc/$1/cmdline" | grep -qF "$2/node.json"
  else
    ps -o args= -p "$1" 2>/dev/null | grep -qF "$2/node.json"
  fi
}

# Whether a runner serves the folder $1.
serves() {
  pid=$(cat "$1/runner.pid" 2>/dev/null || true)
  [ -n "$pid" ] && is_runner "$pid" "$1"
}

# Ends process $1 where it is one of the folder $2, in its own time, 15 s at most.
end() {
  [ -n "$1" ] && is_runner "$1" "$2" || return 0
  kill -TERM "$1" 2>/dev/null || true
  tries=0
  while is_runner "$1" "$2" && [ "$tries" -lt 150 ]; do
    sleep 0.1
    tries=$((tries + 1))
  done
  # Both lead sessions of their own: what is left of them goes with their process groups.
  kill -KILL "-$1" 2>/dev/null || true
}

# Ends what tasks of the folder $1 have left in sessions of their own, where the runner could not do it.
end_left() {
  for process in /proc/[0-9]*; do
    if tr '\0' '\n' 2>/dev/null <"$process/environ" | grep -qxF "SKYINFRA_RUNNER_OF=$1"; then
      kill -KILL "${process#/proc/}" 2>/dev/null || true
    fi
  done
}

# Needs neither Python nor the runner, so that a fleet can be destroyed after its environment is gone.
down() {
  [ -d "$FOLDER" ] || exit 0
  folder=$(cd "$FOLDER" && pwd -P)
  # The watchdog first, which would start the runner again; keeper.pid is its name in the version before.
  for name in watchdog.pid keeper.pid runner.pid; do
    end "$(cat "$folder/$name" 2>/dev/null || true)" "$folder"
  done
  end_left "$folder"
  state=$(dirname "$folder")/head
  if [ -d "$state" ] && [ "$folder" != "$state" ] && [ -e "$folder/scheduler" ]; then
    take_over "$folder" "$state"
    mv -f "$folder/scheduler" "$state/scheduler"
  fi
  rm -rf "$folder" || fail "the folder $folder cannot be removed"
  remove_empty "$(dirname "$folder")"
}

template() {
  make_folder "$FOLDER"
  write "$FOLDER/group.json" "$CONFIGURATION"
}

# A head that still runs starts no node without the file.
end_group() {
  rm -f "$FOLDER/group.json" "$FOLDER/group.json.new"
  for group_node in "$FOLDER/$NAME-group-"*; do
    [ ! -d "$group_node" ] || (FOLDER=$group_node && down)
  done
  remove_empty "$FOLDER"
}

case "${1-}" in
  secret | forget | state | up | down | template | end_group) "$1" ;;
  *) fail "usage: node.sh secret|forget|state|up|down|template|end_group" ;;
esac
