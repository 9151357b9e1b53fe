#!/bin/sh
# Deploy, run one task on every slot, destroy, whatever happens in between.
set -eu
cd "$(dirname "$0")"

leave() {
  code=$?
  trap - EXIT INT TERM
  skyinfra destroy --auto-approve || exit 1
  rm -rf cdktf.out terraform.quickstart.tfstate terraform.quickstart.tfstate.backup
  exit "$code"
}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

skyinfra deploy --auto-approve
python tasks.py
