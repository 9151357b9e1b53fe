#!/bin/sh
# What root does on a machine that is set up over SSH; host.sh sends it there by standard input.
#   claim FLEET ID NODE NEW   make it that node of the fleet, where it can be one; NEW is 0 where it stood before
#   up                        set it up with what was delivered, anew where it has been set up before
#   configure                 put the delivered configuration of the node in place: the running node takes it over
#   state                     one line: ready, stopped WHY, failed WHY, or what it does
#   down FLEET ID NODE        give it back as it was found
set -eu
umask 022
etc=/etc/skyinfra opt=/opt/skyinfra var=/var/lib/skyinfra run=/run/skyinfra units=/etc/systemd/system
delivered=$opt/delivered
runner=$opt/venv/bin/skyinfra-runner

fail() {
  echo "$1" >&2
  exit 1
}

# Which node it is; of one that was set up by an earlier version its configuration says it.
own() {
  cat "$etc/node" 2>/dev/null || sed -n 's/.*"node":"\([^"]*\)".*/\1/p' "$etc/node.json" 2>/dev/null || true
}

services() {
  for each in "$units"/skyinfra-*.service "$units"/skyinfra-*.path; do
    [ ! -f "$each" ] || basename "$each"
  done
}

claim() {
  if [ -e "$etc/fleet" ]; then
    if [ "$(cat "$etc/fleet")" = "$1 $2" ]; then
      own=$(own)
      # One that was just made has that name from an image of another node.
      [ "${own:-$3}" = "$3" ] || [ "${4:-0}" != 0 ] || fail "it is the node $own of this fleet already: the declaration has this machine twice. Where the fleet has no $own any more, remove $etc/node and $etc/node.json there."
      echo "$3" >"$etc/node"
      return 0
    fi
    fail "it is a node of the fleet $(cut -d' ' -f1 "$etc/fleet") already$([ "$1" != "$(cut -d' ' -f1 "$etc/fleet")" ] || echo ', of that name, but of another state'). Destroy that one first."
  fi
  # The one that the services start.
  [ -x /usr/bin/python3 ] || fail "there is no python3 in /usr/bin, with which a node sets itself up: apt-get install python3"
  /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' || fail "python3 there is older than 3.8: install a newer one"
  [ -d /run/systemd/system ] || fail "it does not run systemd, which keeps the services of a node: declare sky.Container(host=...) for it"
  # LoadCredential= of the services is new in it.
  version=$(systemctl --version | sed -n '1s/[^0-9]*\([0-9][0-9]*\).*/\1/p')
  [ "${version:-0}" -ge 247 ] || fail "its systemd is ${version:-an unknown one}, and a node needs 247 or later (Ubuntu 22.04, Debian 11, RHEL 9), by which the runner gets the secret"
  for each in "$etc" "$opt" "$var" /var/cache/skyinfra /var/log/skyinfra; do
    [ ! -e "$each" ] || fail "there is $each already, of no fleet that is known there. Remove it where nobody needs it."
  done
  mkdir -m 755 "$etc"
  # Two that come at once: one of them makes the file.
  (set -C && echo "$1 $2" >"$etc/fleet") || fail "another fleet has just taken it"
  echo "$3" >"$etc/node"
  if id skyinfra >/dev/null 2>&1; then touch "$etc/found-user"; fi
}

up() {
  # A node keeps the secret and the versions that it has got.
  cmp -s "$delivered/secret" "$etc/secret" || rm -f "$etc/secret"
  [ ! -e "$delivered/versions.json" ] || cmp -s "$delivered/versions.json" "$opt/versions.json" || rm -f "$opt/versions.json"
  for each in $(services); do
    systemctl stop "$each" || true
  done
  rm -f "$run/booted" "$run/failure.json" "$var/status.json"
  # What stands on the GPUs is noted before anything is changed there.
  mkdir -p "$units/skyinfra-partition.service.d"
  printf '[Service]\nExecStartPre=%s partition --save %s/found.json\n' "$runner" "$etc" >"$units/skyinfra-partition.service.d/found.conf"
  sh "$delivered/user-data"
  systemctl restart --no-block skyinfra-boot.service
}

configure() {
  put() {
    printf '%s' "$3" >"$etc/node.json.new"
  }
  # The line of the user data that puts it, in which the text ends with a line break.
  eval "$(sed -n '\#^put 0644 /etc/skyinfra/node.json #{N;p;q;}' "$delivered/user-data")"
  [ -s "$etc/node.json.new" ] || fail "the user data hold no node.json"
  if cmp -s "$etc/node.json.new" "$etc/node.json"; then
    rm "$etc/node.json.new"
    return 0
  fi
  mv -f "$etc/node.json.new" "$etc/node.json"
  pid=$(systemctl show --value --property=MainPID skyinfra-runner.service)
  [ "${pid:-0}" = 0 ] || kill -HUP "$pid"
}

state() {
  if [ -e "$run/failure.json" ]; then
    echo "stopped $(tail -n 1 /var/log/skyinfra/boot.jsonl)"
  elif [ ! -e "$run/booted" ]; then
    echo "being set up: $(tail -n 1 /var/log/skyinfra/boot.jsonl 2>/dev/null || true)"
  else
    "$runner" status --json --config "$etc/node.json" 2>/dev/null | python3 -c '
import hashlib, json, sys
text = sys.stdin.read()
status = json.loads(text) if text else {"state": "starting", "config_sha256": "", "error": None}
wanted = hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest()
why = (status.get("error") or {}).get("message") or ", ".join(status.get("waits_for") or [])
print("taking over another configuration" if text and status["config_sha256"] != wanted else status["state"], why)' "$etc/node.json"
  fi
}

down() {
  # Of another fleet, or of none any more; or another node, by a second name that the declaration had for its machine.
  [ "$(cat "$etc/fleet" 2>/dev/null || true)" = "$1 $2" ] || return 0
  own=$(own)
  [ "${own:-$3}" = "$3" ] || return 0
  found=$(services)
  for each in $found; do
    systemctl disable --now "$each" 2>/dev/null || systemctl stop "$each" || true
  done
  if [ -e "$etc/found.json" ] && [ -x "$runner" ]; then
    "$runner" partition --restore "$etc/found.json" >/dev/null || fail "the GPUs cannot be brought back to how they were found."
  fi
  for each in $found; do
    rm -f "$units/$each"
  done
  rm -f "$units/skyinfra-partition.service.d/found.conf" /etc/needrestart/conf.d/skyinfra.conf
  rmdir "$units/skyinfra-partition.service.d" 2>/dev/null || true
  systemctl daemon-reload
  systemctl reset-failed 'skyinfra-*' 2>/dev/null || true
  for each in "update-ca-certificates /usr/local/share/ca-certificates/skyinfra.crt" "update-ca-trust /etc/pki/ca-trust/source/anchors/skyinfra.crt"; do
    if [ -e "${each#* }" ]; then
      rm -f "${each#* }"
      "${each%% *}" >/dev/null 2>&1 || true
    fi
  done
  if [ ! -e "$etc/found-user" ] && id skyinfra >/dev/null 2>&1; then
    userdel skyinfra || fail "the user skyinfra cannot be removed."
  fi
  rm -rf "$opt" "$var" "$run" "$run"-* /var/cache/skyinfra /var/log/skyinfra
  # Last: it says whose the rest is.
  rm -rf "$etc"
}

action=$1
shift
# What it starts must not read on from this text.
"$action" "$@" </dev/null
