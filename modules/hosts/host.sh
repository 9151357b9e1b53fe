#!/bin/sh
# One machine, driven by Terraform through `ssh`, whose configuration, agent and known hosts hold.
# What it needs comes in the environment, so that nothing has to be quoted, and reaches the machine by standard input, so
# that no list of processes shows it. Of the machine: HOST SSH_USER SSH_PORT HOST_KEY KEY_FILE, and VIA... for the one to
# go through; of the fleet: FLEET FLEET_ID, and of claim and down NODE, which it is. HOPS are those to reach VIA through, a line for each. Of a machine that was just made: PATIENCE, the seconds that it may take until it
# answers; and where nobody can know its host key before the first contact, KNOWN_HOSTS, the file that keeps the key from
# then on, under the name KNOWN_AS.
#   host.sh claim        whether it can be the node, and of no other fleet, and no other one of this
#   host.sh deliver      SECRET VERSIONS RUNNER USER_DATA [HEAD_...]   what it is set up with, for root alone
#   host.sh up           WAIT    set it up, until every slot is ready
#   host.sh configure    WAIT    put the delivered configuration in place, until every slot is ready
#   host.sh down         give it back
set -eu
umask 077
here=$(dirname "$0")

fail() {
  echo "skyinfra: $1" >&2
  exit 1
}

work=$(mktemp -d) || fail "no temporary folder can be made"
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# The lines by which ssh reaches machine $1, whose user is $2, port $3, host key $4, and key file $5.
reached_by() {
  check_words "$@"
  echo "Host $1"
  [ -z "$2" ] || echo "  User $2"
  [ "$3" = 0 ] || echo "  Port $3"
  [ -z "$5" ] || printf '  IdentityFile "%s"\n  IdentitiesOnly yes\n' "$5"
  if [ -n "$4" ]; then
    # Under a name of its own, for whatever address and port it is reached by.
    echo "skyinfra-$1 $4" >"$work/known-$1"
    printf '  HostKeyAlias skyinfra-%s\n  UserKnownHostsFile "%s"\n  GlobalKnownHostsFile /dev/null\n' "$1" "$work/known-$1"
  elif [ -n "${KNOWN_HOSTS-}" ]; then
    mkdir -p "$(dirname "$KNOWN_HOSTS")"
    printf '  HostKeyAlias %s\n  UserKnownHostsFile "%s"\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking accept-new\n' "$KNOWN_AS" "$KNOWN_HOSTS"
  fi
}

# The machine whose lines come before is reached through $1.
through() {
  echo "  ProxyCommand ssh -F \"$work/config\" -W [%h]:%p -- $1"
}

# Fails where a cloud, or a declaration, has given an option of ssh, or another line of its configuration: an address $1,
# a user $2, a port $3, a host key $4, a key file $5.
check_words() {
  for word in "$1" "$2" "$3"; do
    case $word in
      -* | *[!A-Za-z0-9._:@%+-]*) fail "ssh takes no such name, address or user: $word" ;;
    esac
  done
  for word in "$4" "$5"; do
    case $word in
      -* | *[[:cntrl:]]*) fail "ssh takes no such key, or file of one: $word" ;;
    esac
  done
  case $5 in
    *\"* | *\\*) fail "the path of a key has no quotes and backslashes: $5" ;;
  esac
}

# What is declared comes before what the configuration of the person says, as ssh takes the first.
configure_ssh() {
  check_words "" "" "" "${KNOWN_AS-}" ""
  {
    reached_by "$HOST" "$SSH_USER" "$SSH_PORT" "$HOST_KEY" "$KEY_FILE"
    if [ -n "$VIA" ]; then
      through "$VIA"
      reached_by "$VIA" "$VIA_USER" "$VIA_PORT" "$VIA_HOST_KEY" "$VIA_KEY_FILE"
      [ -z "${HOPS-}" ] || printf '%s\n' "$HOPS" | while IFS=$(printf '\037') read -r address user port key key_file; do
        through "$address"
        reached_by "$address" "$user" "$port" "$key" "$key_file"
      done
    fi
    echo "Host *"
    # A command that the person's configuration has for logins takes the place of ours.
    printf '  RemoteCommand none\n  RequestTTY no\n  BatchMode yes\n  StrictHostKeyChecking yes\n  ConnectTimeout 10\n  ServerAliveInterval 5\n  ServerAliveCountMax 6\n'
    [ ! -e "${HOME-}/.ssh/config" ] || echo "  Include \"$HOME/.ssh/config\""
    [ ! -e /etc/ssh/ssh_config ] || echo "  Include /etc/ssh/ssh_config"
  } >"$work/config"
}

# Executes $1, which holds no single quote, as root on the machine, with the standard input of this program. What the
# machine prints before it, as by a .bashrc, is no part of the answer: that begins behind a line of its own. Nothing comes
# after it: `exec` puts the program in the place of the login's shell, whose traps and files of logout then print no more.
# So the answer needs no other frame, and may be any bytes, such as those of a wheel.
root() {
  {
    code=0
    ssh -F "$work/config" -T -- "$HOST" "exec sh -c 'echo skyinfra-answer; if [ \$(id -u) = 0 ]; then exec sh -c \"\$1\"; else exec sudo -n sh -c \"\$1\"; fi' sh '$1'" 2>"$work/error" || code=$?
    echo "$code" >"$work/code"
  } | {
    while IFS= read -r line && [ "$line" != skyinfra-answer ]; do :; done
    cat
  }
  return "$(cat "$work/code")"
}

# Executes node.sh there with these arguments.
node() {
  root "exec sh -s $*" <"$here/node.sh"
}

# Ends with what ssh or the program on the machine has said; $1 is how it ended, $2 what to add.
refused() {
  # Of these sudo only warns, and does what it is asked.
  said=$(grep -Ev "^sudo: (unable to resolve host|setrlimit\()" "$work/error" | tail -n 3 | tr '\n' ' ')
  case $said in
    *"Host key verification failed"*)
      [ "${PATIENCE:-0}" = 0 ] || fail "$HOST does not answer with the host key that this fleet knows: another machine answers, or it has not taken what it was made with. Look at it in the cloud's console; terraform apply -replace makes it anew"
      if grep -q "key is known for" "$work/error" && [ -z "$HOST_KEY" ]; then
        fail "the host key of $HOST${VIA:+, or of $VIA,} is not known. Log in by hand once, comparing the key: ssh $HOST. Or declare it: sky.Host(host_key=...) with what \`ssh-keyscan $HOST\` says, compared with /etc/ssh/*.pub there"
      fi
      fail "$HOST${VIA:+, or $VIA,} has another host key than is declared or known: another machine answers, or it was set up anew. Then declare its new host_key, or forget the old one: ssh-keygen -R $HOST"
      ;;
    *"sudo: "*) fail "$HOST: the user has no sudo without a password, and is not root: ${said}Add a line to /etc/sudoers.d there: USER ALL=(ALL) NOPASSWD: ALL" ;;
  esac
  [ "$1" != 255 ] || fail "$HOST cannot be reached by ssh: $said${2-}"
  fail "$HOST: $said${2-}"
}

# A machine that was just made answers after a while, and at first perhaps with another host key than that which it gets.
claim() {
  end=$(($(date +%s) + ${PATIENCE:-0}))
  until node claim "$FLEET" "$FLEET_ID" "$NODE" "${PATIENCE:-0}"; do
    code=$?
    [ "$code" = 255 ] && [ "$(date +%s)" -lt "$end" ] || refused "$code"
    sleep 3
  done
  # What its image does at its first boot comes before what we do.
  [ "${PATIENCE:-0}" = 0 ] || root "command -v cloud-init >/dev/null && timeout $PATIENCE cloud-init status --wait" </dev/null >/dev/null || true
}

# Puts standard input, of $2 bytes, there as $1 of the folder of what is delivered.
put() {
  root "set -e; mkdir -p /opt/skyinfra; chmod 755 /opt/skyinfra; umask 077; mkdir -p /opt/skyinfra/delivered; cd /opt/skyinfra/delivered; cat >$1.new; [ \$(wc -c <$1.new) = $2 ]; mv -f $1.new $1" || refused $?
}

put_text() {
  printf '%s' "$2" | put "$1" "$(printf '%s' "$2" | wc -c | tr -d ' ')"
}

put_file() {
  put "$1" "$(wc -c <"$2" | tr -d ' ')" <"$2"
}

# The head keeps the first versions. The other nodes have those of the head, whoever applies, also where it was made anew.
deliver() {
  put_text secret "$SECRET"
  put_text user-data "$USER_DATA"
  [ -n "$VERSIONS" ] || return 0
  versions=$work/versions.json wheel=$RUNNER
  root "cat /opt/skyinfra/delivered/versions.json 2>/dev/null || true" </dev/null >"$work/own.json" || refused $?
  [ -n "${HEAD_HOST-}" ] || [ ! -s "$work/own.json" ] || return 0
  if [ -n "${HEAD_HOST-}" ]; then
    from_head "cat /opt/skyinfra/delivered/versions.json" >"$versions"
    ! cmp -s "$versions" "$work/own.json" || return 0
    name=$(sed -n 's/.*"wheel":{"name":"\([^"]*\)".*/\1/p' "$versions")
    if [ -n "$name" ] && [ "$name" != "$(basename "$RUNNER")" ]; then
      wheel=$work/$name
      from_head "cat /opt/skyinfra/delivered/$name" >"$wheel"
    fi
  else
    printf '%s' "$VERSIONS" >"$versions"
  fi
  [ -z "$wheel" ] || put_file "$(basename "$wheel")" "$wheel"
  put_file versions.json "$versions"
}

from_head() (
  HOST=$HEAD_HOST SSH_USER=$HEAD_SSH_USER SSH_PORT=$HEAD_SSH_PORT HOST_KEY=$HEAD_HOST_KEY KEY_FILE=$HEAD_KEY_FILE
  KNOWN_AS=${HEAD_KNOWN_AS-}
  VIA=$HEAD_VIA VIA_USER=$HEAD_VIA_USER VIA_PORT=$HEAD_VIA_PORT VIA_HOST_KEY=$HEAD_VIA_HOST_KEY VIA_KEY_FILE=$HEAD_VIA_KEY_FILE
  HOPS=${HEAD_HOPS-}
  work=$work/head
  mkdir -p "$work"
  configure_ssh
  root "$1" </dev/null || refused $?
)

up() {
  node up || refused $?
  await
}

configure() {
  node configure || refused $?
  await
}

# Waits until every slot is ready. A machine may reboot meanwhile: it is asked again and again.
await() {
  end=$(($(date +%s) + WAIT))
  answered=$(date +%s) failing=
  while :; do
    now=$(date +%s)
    if state=$(node state); then
      answered=$now
    elif [ $((now - answered)) -gt 300 ]; then
      refused 255 "It has not answered for 5 minutes."
    else
      state=silent
    fi
    case $state in
      ready*) return 0 ;;
      stopped*) fail "$HOST was not set up: ${state#stopped }. /var/log/skyinfra/boot.jsonl there has all of it." ;;
      failed*)
        # The runner tries again what may pass.
        failing=${failing:-$now}
        [ $((now - failing)) -lt 60 ] || fail "$HOST does not serve its slots: ${state#failed }"
        ;;
      *) failing= ;;
    esac
    [ "$now" -lt "$end" ] || fail "$HOST is not ready within $WAIT s: $state"
    sleep 2
  done
}

down() {
  # It is let go by the name of its node, and by its address where that is all of its name: machines behind one address
  # are told apart by port, way or a name of their own (../ssh).
  gone=$NODE
  plain=$(printf '%s' "$HOST" | tr A-Z a-z | sed 's/[^a-z0-9]\{1,\}/-/g; s/^-//; s/-$//')
  [ "$NODE" != "${FLEET#*/}-$plain" ] || gone=$HOST
  case ",${SKYINFRA_GONE-}," in
    *",$NODE,"* | *",$gone,"*) exit 0 ;;
  esac
  node down "$FLEET" "$FLEET_ID" "$NODE" || refused $? "What the fleet has put there stays until it is given back: destroy again once that works. Where the machine is gone for good, leave it as it is with SKYINFRA_GONE=$gone in the environment."
}

configure_ssh
case "${1-}" in
  # These alone are given NODE: npm sets one of its own.
  claim | down)
    check_words "$NODE" "" "" "" ""
    "$1"
    ;;
  deliver | up | configure) "$1" ;;
  *) fail "usage: host.sh claim|deliver|up|configure|down" ;;
esac
