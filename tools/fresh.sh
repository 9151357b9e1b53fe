#!/bin/sh
# Runs a target of make in a bare Debian, where nothing was installed by hand: sh tools/fresh.sh FOLDER [TARGET]
# FOLDER holds the Debian and is used again; the checkout goes there as it is committed. Needs root, debootstrap and
# systemd-nspawn. The registries of Python packages and of Debian's are those of this machine, with the folders and
# certificates that their configuration names.
set -eu
root=$(realpath -m "$1")
target=${2:-test}

{ command -v debootstrap && command -v systemd-nspawn; } >/dev/null || {
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends debootstrap systemd-container
}
. /etc/os-release
if ! test -e "$root/etc/fresh"; then
  rm -rf "$root"
  mkdir -p "$(dirname "$root")"
  debootstrap --variant=minbase --include=python3,python3-venv,make,git,ca-certificates,procps,iproute2,gcc,libc6-dev,systemd \
    "$VERSION_CODENAME" "$root" >"$root.log" 2>&1 || { tail -n 20 "$root.log" >&2; exit 1; }
  echo '127.0.0.1 localhost' >"$root/etc/hosts"
  touch "$root/etc/fresh"
fi
rm -rf "$root/work"
mkdir -p "$root/work"
git archive HEAD | tar -x -C "$root/work"
# Some tests ask git which files there are.
git -C "$root/work" init -q && git -C "$root/work" add -A

# What is there of it is shown to the Debian at the same place, and nobody can write to it.
set --
for path in /etc/pip.conf /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/apt.conf.d /etc/ssl/certs /usr/local/share/ca-certificates /etc/resolv.conf \
  $(python3 -m pip config list 2>/dev/null | grep -oE "(file://)?/[^' ]+" | sed 's|^file://||; s|/simple$||' | sort -u); do
  test -e "$path" && set -- "$@" "--bind-ro=$path"
done
for name in $(env | grep -oE '^(PIP|npm_config|NPM_CONFIG)_[A-Za-z_]+|^(https?|no)_proxy|^(HTTPS?|NO)_PROXY'); do
  set -- "$@" "--setenv=$name=$(printenv "$name")"
done
exec systemd-nspawn --quiet --directory="$root" --register=no --keep-unit --pipe --console=pipe --chdir=/work "$@" \
  --setenv=HOME=/root make "$target"
