#!/bin/sh
# Nodes as containers, driven by Terraform through the program of Docker or Podman. What it needs comes in the
# environment, so that nothing has to be quoted and no secret stands on a command line. ENGINE is that program, HOST the
# address of another machine's engine or empty:
#   node.sh find      FILE [ENGINE]                  write to FILE which engine answers
#   node.sh forget    FILE                           remove FILE
#   node.sh prepare   IMAGE NETWORK DELIVERED STATE  make network and volumes; DELIVERED gets SECRET, VERSIONS and the
#                     SECRET VERSIONS RUNNER         file RUNNER, from which the nodes take them
#   node.sh clear     [NETWORK] [VOLUMES]            remove them
#   node.sh up        CONTAINER ...                  start the container, made where there is none, and wait for its slots
#   node.sh bounds    CONTAINER BOUNDS               tell the head CONTAINER the least and the most nodes
#   node.sh running   CONTAINER                      exit 0 where it runs
#   node.sh down      CONTAINER                      stop and remove it
set -eu
umask 077

fail() {
  echo "skyinfra: $1" >&2
  exit 1
}

# The program of the engine $ENGINE, for the machine HOST.
engine() {
  case "$ENGINE:${HOST-}" in
    *:) "$ENGINE" "$@" ;;
    docker:*) docker --host "$HOST" "$@" ;;
    podman:unix:* | podman:ssh://*/*) podman --remote --url "$HOST" "$@" ;;
    # Where Podman's service of the machine listens.
    podman:ssh://root@*) podman --remote --url "$HOST/run/podman/podman.sock" "$@" ;;
    *) fail "host: Podman needs the path of the socket on the other machine, such as ssh://me@gpu1/run/user/1000/podman/podman.sock (given: $HOST)" ;;
  esac
}

# What of $1, which a program has printed, says what went wrong: its first error, else its last line.
last() {
  { printf '%s\n' "$1" | grep -im 1 error || printf '%s\n' "$1" | grep -v '^[[:space:]]*$' | tail -n 1; } | sed 's/[.]$//'
}

# Fails where HOST names no other machine, and the program speaks to the engine of one all the same.
here() {
  [ -z "${HOST-}" ] || return 0
  if [ "$ENGINE" = docker ]; then
    place=${DOCKER_HOST:-$(docker context inspect --format '{{.Endpoints.docker.Host}}' 2>/dev/null || true)}
  else
    place=${CONTAINER_HOST-}
    [ -n "$place" ] || [ -z "${CONTAINER_CONNECTION-}" ] ||
      place=$(podman system connection list --format '{{.Name}}={{.URI}}' 2>/dev/null | sed -n "s|^$CONTAINER_CONNECTION[*]*=||p")
  fi
  address=${place#*://}
  address=${address%%/*}
  case "$address" in :*) address=127.0.0.1 ;; esac
  case "$place:${address##*@}" in
    *:127.*.*.* | *:0.0.0.0 | *:0.0.0.0:* | *:localhost | *:localhost:* | *:'[::1]' | *:'[::1]':*) ;;
    ssh://* | tcp://*)
      fail "engine: $ENGINE speaks to $place (its context, or a variable), and this fleet is of this machine: declare sky.Container(host=\"ssh://...\"), or unset that" ;;
  esac
}

# Fails where the engine does not answer, or is not the one that is declared.
answers() {
  command -v "$ENGINE" >/dev/null 2>&1 || fail "engine: $ENGINE is not installed on this machine: install it, or put it on PATH"
  here
  said=$(engine ps -q 2>&1) || fail "engine: $ENGINE does not answer${HOST:+ at $HOST}: $(last "$said"): start its service, and let this user use it, so that \`$ENGINE ps\` works here"
}

# Fails where the engine at HOST is of a user whose processes end with the last login, so that nodes would too. On this
# machine, where that may be meant, it only says so.
lingers() {
  place=${HOST-}
  here
  case "$ENGINE:$place" in
    *:ssh://*/run/user/[1-9]*/*)
      machine=${place%%/run/user/*}
      # Of whom the socket is, whoever logs in.
      user=${place#*/run/user/}
      user=${user%%/*}
      status=0
      # One before 7.6 knows no such option.
      alone=
      ! ssh -G "$machine" 2>/dev/null | grep -q '^remotecommand ' || alone="-o RemoteCommand=none"
      ssh -n -o BatchMode=yes $alone -o ConnectTimeout=10 "$machine" \
        "test ! -d /run/systemd/system || test -f /var/lib/systemd/linger/\$(getent passwd $user | cut -d: -f1)" >/dev/null 2>&1 || status=$?
      # Any other one is of an ssh that does not get there, as Podman may by ways of its own.
      [ "$status" != 1 ] || fail "host: containers of the user $user end with its last login: run \`loginctl enable-linger $user\` there (given: $HOST)"
      ;;
    podman: | *:unix:*/run/user/[1-9]*)
      [ "$(id -u)" = 0 ] || [ "$(loginctl show-user "$(id -un)" --property=Linger --value 2>/dev/null)" != no ] ||
        echo "skyinfra: containers of $(id -un) end when it logs out of this machine: \`loginctl enable-linger\` keeps them" >&2
      ;;
  esac
}

find_engine() {
  tried=
  for ENGINE in ${ENGINE:-docker podman}; do
    if said=$(answers 2>&1); then
      lingers
      mkdir -p "$(dirname "$FILE")" || fail "the folder of $FILE cannot be made: is the disk full, or its parent not yours?"
      printf '%s\n' "$ENGINE" >"$FILE"
      return
    fi
    tried="$tried
${said#skyinfra: }"
  done
  fail "no engine for containers answers:$tried"
}

forget() {
  rm -f "$FILE"
  folder=$(dirname "$FILE")
  rmdir "$folder" 2>/dev/null && rmdir "$(dirname "$folder")" 2>/dev/null || true
}

pull() {
  engine image inspect "$IMAGE" >/dev/null 2>&1 && return
  said=$(engine pull "$IMAGE" 2>&1) || fail "image: $IMAGE cannot be pulled: $(last "$said"). Check its name; for a private one log in with \`$ENGINE login\`."
}

# Makes a folder for what is copied into containers, which is removed at the end.
stage() {
  folder=$(mktemp -d) || fail "no folder for temporary files can be made: is the disk full?"
  trap 'rm -rf "$folder"' EXIT
  trap 'exit 1' HUP INT TERM
}

# Puts these files of the folder into the folder $1 of a container, for root, with their modes. They come by standard
# input: an engine that is a snap sees no /tmp but its own.
put() {
  place=$1
  shift
  # GNU's tar and that of BSD have options of their own for it.
  owner=
  for tried in "--owner=0 --group=0" "--uid=0 --gid=0"; do
    ! COPYFILE_DISABLE=1 tar -C "$folder" $tried -cf - "$@" >/dev/null 2>&1 || { owner=$tried && break; }
  done
  COPYFILE_DISABLE=1 tar -C "$folder" $owner -cf - "$@" | engine cp - "$place"
}

make_volume() {
  engine volume inspect "$1" >/dev/null 2>&1 && return
  said=$(engine volume create --label skyinfra=1 "$1" 2>&1) || fail "the volume $1 cannot be made: $(last "$said")"
}

prepare() {
  answers
  pull
  if [ -n "$NETWORK" ] && ! engine network inspect "$NETWORK" >/dev/null 2>&1; then
    said=$(engine network create --label skyinfra=1 "$NETWORK" 2>&1) || fail "the network $NETWORK cannot be made: $(last "$said"). Name one that there is: sky.Container(network=...)."
  fi
  make_volume "$STATE"
  make_volume "$DELIVERED"
  stage
  printf '%s' "$SECRET" >"$folder/secret"
  [ -z "$VERSIONS" ] || printf '%s' "$VERSIONS" >"$folder/versions.json"
  [ -z "$RUNNER" ] || cp "$RUNNER" "$folder/"
  # Engines copy into containers, and so into volumes: this one is never started.
  engine rm -f "$DELIVERED" >/dev/null 2>&1 || true
  said=$(engine create --name "$DELIVERED" --volume "$DELIVERED:/delivered" --entrypoint /bin/sh "$IMAGE" 2>&1) || fail "a container of $IMAGE cannot be made: $(last "$said")"
  said=$(put "$DELIVERED:/delivered" . 2>&1) || fail "the volume $DELIVERED cannot be written: $(last "$said")"
  engine rm -f "$DELIVERED" >/dev/null
}

# Whether the engine has one of these, of whichever machine it is: what a version before made elsewhere is removed there.
has() {
  kind=$1
  shift
  for each in "$@"; do
    ! (engine "$kind" inspect "$each") >/dev/null 2>&1 || return 0
  done
  return 1
}

clear_all() {
  has volume ${VOLUMES-} || has network ${NETWORK-} || answers
  for volume in ${VOLUMES-}; do
    engine rm -f "$volume" >/dev/null 2>&1 || true
    if engine volume inspect "$volume" >/dev/null 2>&1; then
      said=$(engine volume rm "$volume" 2>&1) || fail "the volume $volume cannot be removed: $(last "$said")"
    fi
  done
  if [ -n "${NETWORK-}" ] && engine network inspect "$NETWORK" >/dev/null 2>&1; then
    said=$(engine network rm "$NETWORK" 2>&1) || fail "the network $NETWORK cannot be removed: $(last "$said"). \`$ENGINE network inspect $NETWORK\` says what is in it."
  fi
}

# State and number of restarts of the container, and the node that it was made for; nothing where there is none.
look() {
  { said=$(engine container inspect --format '{{.State.Status}} {{.RestartCount}} {{index .Config.Labels "skyinfra.made-for"}}' "$CONTAINER" 2>&1 >&3) && return; } 3>&1
  printf '%s\n' "$said" | grep -qi 'no such container' || fail "engine: $ENGINE does not say whether there is $CONTAINER: $(last "$said")"
}

remove() {
  engine stop -t 15 "$CONTAINER" >/dev/null 2>&1 || true
  said=$(engine rm -f -v "$CONTAINER" 2>&1) || fail "the container $CONTAINER cannot be removed: $(last "$said")"
}

# Adds to "$@" of its caller, by printing: one argument a line.
gpu_arguments() {
  [ -n "$GPUS" ] || return 0
  if [ "$ENGINE" = docker ]; then
    echo --gpus
    # Docker reads the value as CSV.
    [ "$GPUS" = all ] && echo all || echo "\"device=$GPUS\""
  else
    for gpu in $(echo "$GPUS" | tr , ' '); do
      echo --device
      echo "nvidia.com/gpu=$gpu"
    done
  fi
}

network_arguments() {
  echo --network
  echo "$NETWORK"
  [ "$NETWORK" != host ] || return 0
  echo --hostname
  echo "$NODE"
  [ -z "$PUBLISH" ] || printf '%s\n' --publish "$PUBLISH"
  # Docker has a name server for its networks. That of Podman is a program apart, so the head gets a fixed address in
  # a network of the pool's own.
  if [ "$ENGINE" = podman ] && [ -n "$OWN_NETWORK" ]; then
    gateway=$(engine network inspect --format '{{range .Subnets}}{{.Gateway}} {{end}}' "$NETWORK" | cut -d ' ' -f 1)
    printf '%s\n' --add-host "$HEAD:${gateway%.*}.250"
    [ "$CONTAINER" != "$HEAD" ] || printf '%s\n' --ip "${gateway%.*}.250"
  fi
}

label_arguments() {
  printf '%s\n' --label "skyinfra.made-for=$MADE_FOR" --label "skyinfra.node=$NODE"
  [ -z "$LABELS" ] || printf '%s\n' "$LABELS" | sed 's/^/--label=/'
}

make() {
  pull
  [ "$NETWORK" = host ] || engine network inspect "$NETWORK" >/dev/null 2>&1 || fail "network: $ENGINE has no network $NETWORK: make it with \`$ENGINE network create $NETWORK\`, or leave it out for one of the pool"
  engine volume inspect "$DELIVERED" >/dev/null 2>&1 || fail "the volume $DELIVERED with the runner and the secret of the fleet is gone: destroy the pool and deploy it again"
  arguments=$(gpu_arguments && network_arguments && label_arguments)
  # Neither the secret nor its copies are in what an image of this container would hold.
  set -- create --name "$CONTAINER" --user 0 --restart "${RESTART:-always}" --security-opt no-new-privileges --shm-size 8g \
    --volume "$DELIVERED:/opt/skyinfra/delivered:ro" --tmpfs /etc/skyinfra:mode=0755 --tmpfs /run/skyinfra:mode=0755
  [ -z "$STATE" ] || set -- "$@" --volume "$STATE:/var/lib/skyinfra-head"
  # The head says there which nodes are to run, and they when they have ended.
  if [ -n "${GROUP-}" ]; then
    make_volume "$GROUP"
    set -- "$@" --volume "$GROUP:/opt/skyinfra/group"
  fi
  lines=$(mktemp "$folder/XXXXXX")
  printf '%s\n' "$arguments" >"$lines"
  while IFS= read -r line; do
    set -- "$@" "$line"
  done <"$lines"
  said=$(engine "$@" --entrypoint /bin/sh "$IMAGE" /skyinfra-start 2>&1) || explain "$said"
  printf '%s' "$USER_DATA" >"$folder/skyinfra-start"
  said=$(put "$CONTAINER:/" skyinfra-start 2>&1) || fail "the start script cannot be copied into $CONTAINER: $(last "$said")"
}

# Says why a container was not made or started.
explain() {
  said=$(last "$1")
  case "$said" in
    *"address already in use"* | *"already allocated"*)
      fail "port: ${PUBLISH%:*} is taken on the host: name another, sky.Container(port=...), or end what has it" ;;
    *CDI* | *nvidia* | *"device driver"*)
      fail "gpus: the container gets no GPUs $GPUS: $said. \`nvidia-smi -L\` lists those that it has; $ENGINE needs the NVIDIA Container Toolkit, and Podman the file that \`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml\` writes" ;;
    *) fail "$NODE cannot be started: $said" ;;
  esac
}

# Waits, in the container, until the node has its slots, or waits until it is wanted. Its last line is 3 where it has
# failed, 4 where it is not ready in time.
waiter='
import json, os, sys, time
until = time.monotonic() + float(sys.argv[1])
while not os.path.exists("/run/skyinfra/waits"):
    try:
        with open("/var/lib/skyinfra/status.json") as file:
            found = json.load(file)
    except (OSError, ValueError):
        found = {"state": "booting", "error": None}
    said = (found["error"] or {}).get("message") or "its state is " + found["state"]
    if found["state"] == "ready":
        break
    if found["state"] == "failed":
        sys.exit(said + "\n3")
    if time.monotonic() > until:
        sys.exit(said + "\n4")
    time.sleep(0.3)
'

log() {
  engine logs --tail "$1" "$CONTAINER" 2>&1 | uniq || true
}

# Of the output of a container that has ended, what says why. One that was started again has printed its first steps
# after that, and these went well.
why_ended() {
  said=$(log 60 | grep -Ev '"state": "(started|done|skipped)"' | tail -n 10)
  printf '%s\n' "${said:-$(log 10)}"
}

wait_for_slots() {
  until=$(($(date +%s) + WAIT))
  while :; do
    left=$((until - $(date +%s)))
    [ "$left" -gt 0 ] || left=0
    said=$(engine exec --user 0 "$CONTAINER" python3 -c "$waiter" "$left" 2>&1) && return
    case "$(printf '%s\n' "$said" | tail -n 1)" in
      3) fail "$NODE has failed: $(printf '%s\n' "$said" | sed '$d')" ;;
      4) fail "$NODE is not ready within $WAIT s: $(printf '%s\n' "$said" | sed '$d')
$(log 10)" ;;
    esac
    # It is not there to be asked: it ended, or has no Python.
    state=$(look)
    restarts=$(echo "$state" | cut -d ' ' -f 2)
    [ "${state%% *}" = running ] && [ "$restarts" = "$1" ] && [ "$left" -gt 0 ] || fail "$NODE has ended instead of starting: $(why_ended)"
    sleep 1
  done
}

up() {
  answers
  stage
  found=$(look)
  case "$found" in
    created* | configured* | initialized* | dead* | removing*) known= ;;
    *" $MADE_FOR") known=1 ;;
    *) known= ;;
  esac
  if [ -z "$known" ]; then
    [ -z "$found" ] || remove
    make
    said=$(engine start "$CONTAINER" 2>&1) || explain "$said"
  elif ! engine exec --user 0 "$CONTAINER" python3 -c "$waiter" 0 >/dev/null 2>&1; then
    # What it said of itself when it ended, or failed, counts no more.
    : >"$folder/status.json"
    put "$CONTAINER:/var/lib/skyinfra" status.json >/dev/null 2>&1 || true
    said=$(engine restart -t 15 "$CONTAINER" 2>&1) || explain "$said"
  fi
  wait_for_slots "$(look | cut -d ' ' -f 2)"
}

bounds() {
  answers
  said=$(engine exec --user 0 "$CONTAINER" sh -c 'umask 022 && cd /opt/skyinfra/group && echo "$1" >bounds.new && mv bounds.new bounds' sh "$BOUNDS" 2>&1) || fail "the head $CONTAINER is not told how many nodes there may be: $(last "$said")"
}

running() {
  found=$(look)
  case "$found" in "running "*) ;; *) exit 1 ;; esac
}

down() {
  has container "$CONTAINER" || answers
  found=$(look)
  [ -z "$found" ] || remove
}

case "${1-}" in
  find) find_engine ;;
  clear) clear_all ;;
  forget | prepare | up | bounds | running | down) "$1" ;;
  *) fail "usage: node.sh find|forget|prepare|clear|up|bounds|running|down" ;;
esac
