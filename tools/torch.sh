#!/bin/sh
# Debian's PyTorch, with what it needs and this machine lacks, unpacked in a folder: sh tools/torch.sh FOLDER PYTHON
# An empty folder says that it is for another Python.
# It needs apt, and root only where apt has no lists yet. Installed, it would take four times as long and leave 176
# packages on the machine; PyPI's brings gigabytes of CUDA.
set -eu
folder=$(realpath -m "$1")
python=$2
new=$folder.new

apt-cache show python3-torch >/dev/null 2>&1 || apt-get update -qq
minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
apt-cache show python3-torch | grep -qF "python3 (>= $minor~)" || {
  echo "Debian's PyTorch is not for Python $minor: tests that need it are skipped." >&2
  mkdir -p "$folder"
  exit 0
}

download() {
  apt-get install --download-only --yes -qq --no-install-recommends -o Dir::Cache::archives="$new/debs" \
    -o Debug::NoLocking=true -o APT::Sandbox::User=root python3-torch
}
rm -rf "$new"
mkdir -p "$new/debs/partial" "$new/root"
download || { apt-get update -qq && download; }
find "$new/debs" -name '*.deb' | xargs -r -P 2 -n 1 sh -c 'dpkg --extract "$1" "$0/root"' "$new"
# Older Debians keep some libraries in /lib, which is /usr/lib on a machine.
if test -d "$new/root/lib"; then
  cp -a "$new/root/lib/." "$new/root/usr/lib/"
  rm -rf "$new/root/lib"
fi
# Every library that PyTorch loads must be there: a package that happens to be installed here is not elsewhere.
libraries=$(find "$new/root/usr/lib" -name 'lib*.so.*' -exec dirname {} + | sort -u | paste -sd : -)
missing=$(find "$new/root/usr/lib/python3/dist-packages/torch" "$new/root/usr/lib" -maxdepth 3 -type f \
  \( -path '*/torch/*.so' -o -name 'libtorch*.so*' -o -name 'libc10*.so*' -o -name 'libgloo*.so*' -o -name 'libtensorpipe*.so*' \) -print0 |
  LD_LIBRARY_PATH=$libraries xargs -0 -r ldd 2>/dev/null | grep 'not found' | sort -u || true)
if test -n "$missing"; then
  echo "PyTorch as it was unpacked lacks libraries: $missing" >&2
  rm -rf "$new"
  exit 1
fi
mv "$new/root" "$folder"
rm -rf "$new"
