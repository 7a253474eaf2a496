#!/usr/bin/env bash
# A TPU VM or a slice of several, from its creation to its deletion. --print shows every command of
# a step and runs none.
#
#   scripts/launch/tpu_vm.sh [--print] create | setup | run <ffnh command> ... | keep <ffnh command> ...
#                                      | delete
#
#   create   makes it;  setup  installs the package on all workers;  run  runs a command on all workers
#   keep     runs a command until it is done: a preempted TPU is deleted, made anew and set up, and
#            the same command goes on from its work directory, which must be a bucket
#   delete   deletes it: it costs until then
#
# Settings are environment variables:
#   TPU=ffn ZONE=us-west4-a TYPE=v5litepod-8 VERSION=v2-alpha-tpuv5-lite SPOT=1 (0: on demand)
#   SOURCE=<what pip installs: a wheel in a bucket's or a repository's address> (needed by setup)
#
#   SOURCE=git+https://... scripts/launch/tpu_vm.sh keep train --distributed=auto \
#       --config=nucl_finetune:gemma2_2b,gsm8k --workdir=gs://bucket/run
set -euo pipefail
: "${TPU:=ffn}" "${ZONE:=us-west4-a}" "${TYPE:=v5litepod-8}" "${VERSION:=v2-alpha-tpuv5-lite}"
: "${SPOT:=1}" "${SOURCE:=}" "${WAIT:=60}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
show=''
if [[ ${1-} == --print ]]; then show=yes; shift; fi

do_it() {
  if [[ -n $show ]]; then printf '%q ' "$@"; echo; else "$@"; fi
}
tpu() { do_it gcloud compute tpus tpu-vm "$1" "$TPU" --zone="$ZONE" "${@:2}"; }
on_all() { tpu ssh --worker=all --command="$1"; }
quoted() { printf '%q ' "$@"; }

create() {
  local spot=()
  [[ $SPOT == 0 ]] || spot=(--spot)
  tpu create --accelerator-type="$TYPE" --version="$VERSION" "${spot[@]}"
}
setup() {
  [[ -n $SOURCE ]] || { echo "error: set SOURCE to what pip shall install" >&2; exit 2; }
  # The images bring Python 3.10; uv brings its own. All but the package itself by version and hash.
  do_it gcloud compute tpus tpu-vm scp "$here/locked/py3.12.txt" "$TPU:ffn-locked.txt" \
    --zone="$ZONE" --worker=all || return
  local uv='~/.local/bin/uv' into='-q --python ~/ffn/bin/python'
  on_all "pip install -q uv==0.13.9 && $uv venv -q --python 3.12 ~/ffn && $uv pip install $into --require-hashes -r ~/ffn-locked.txt && $uv pip install $into --no-deps $(printf %q "ffn-heterogeneity @ $SOURCE")"
}
run() { on_all "~/ffn/bin/ffnh $(quoted "$@")"; }
there() { [[ $(gcloud compute tpus tpu-vm describe "$TPU" --zone="$ZONE" --format='value(state)' 2>/dev/null) == READY ]]; }
keep() {
  [[ " $* " == *" --workdir=gs://"* ]] || {
    echo "error: keep needs --workdir=gs://...: a preempted TPU's disk is gone" >&2; exit 2; }
  if [[ -n $show ]]; then
    echo "# until it is done; after a preemption:"
    tpu delete --quiet; create; setup; run "$@"
    return
  fi
  local code ready=
  while true; do
    there || { ready=; tpu delete --quiet || true; create || { sleep "$WAIT"; continue; }; }
    [[ $ready ]] || { setup && ready=yes; } || { sleep "$WAIT"; continue; }
    code=0; run "$@" || code=$?
    [[ $code == 0 || $code == 2 || $code == 130 ]] && return "$code"
    echo "tpu_vm.sh: code $code; again in $WAIT s" >&2
    sleep "$WAIT"
  done
}

case ${1-} in
  create | setup) "$1" ;;
  run | keep) (($# > 1)) || { echo "error: $1 what? for example: $1 train --config=..." >&2; exit 2; }
    "$@" ;;
  delete) tpu delete --quiet ;;
  *) sed -n '2,20s/^# \{0,1\}//p' "$0"; [[ ${1-} == --help ]] || exit 2 ;;
esac
