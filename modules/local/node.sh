#!/bin/sh
# One local node, driven by Terraform. What it needs comes in the environment, so that nothing has to be quoted:
#   node.sh secret   FOLDER SECRET                       keep the fleet secret in FOLDER
#   node.sh forget   FOLDER                              remove it, and FOLDER where nothing else is left
#   node.sh up       FOLDER CONFIGURATION RUNNER WAIT    start the node, or let the running one take the configuration over
#   node.sh down     FOLDER                              stop the node and remove its folder
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

up() {
  runner=${SKYINFRA_RUNNER:-$RUNNER}
  command -v "$runner" >/dev/null 2>&1 || fail "the program $runner was not found. Activate the environment skyinfra is installed in, or set SKYINFRA_RUNNER to the path of its skyinfra-runner."
  make_folder "$FOLDER"
  # Terraform may reach the folder through "..", and `down` finds the runner by the folder's one true name.
  folder=$(cd "$FOLDER" && pwd -P)
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

# Needs neither Python nor the runner, so that a fleet can be destroyed after its environment is gone.
down() {
  [ -d "$FOLDER" ] || exit 0
  folder=$(cd "$FOLDER" && pwd -P)
  # The watchdog first, which would start the runner again.
  end "$(cat "$folder/keeper.pid" 2>/dev/null || true)" "$folder"
  end "$(cat "$folder/runner.pid" 2>/dev/null || true)" "$folder"
  rm -rf "$folder" || fail "the folder $folder cannot be removed"
  remove_empty "$(dirname "$folder")"
}

case "${1-}" in
  secret | forget | up | down) "$1" ;;
  *) fail "usage: node.sh secret|forget|up|down" ;;
esac
