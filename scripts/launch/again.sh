#!/usr/bin/env bash
# Runs a command until it is done: after a preemption, a kill, a lost node. Every run here goes on
# where it stopped, bit for bit, so that what is left is to start it again.
#
#   scripts/launch/again.sh [--times=20] [--wait=30] [--requeue] <command> ...
#
# It ends with the command's code 0 (done), 2 (a mistake that starting again cannot mend) or 130
# (Ctrl-C), and with the last code after so many starts. A SIGTERM or SIGHUP of its own is passed on,
# and the command, which saves, is not started again; with --requeue a SLURM job whose command was so
# stopped (code 143) is queued again.
set -u
times=20 wait=30 requeue=''
while [[ ${1-} == --* ]]; do
  case $1 in
    --times=*) times=${1#*=} ;;
    --wait=*) wait=${1#*=} ;;
    --requeue) requeue=yes ;;
    *) sed -n '2,11s/^# \{0,1\}//p' "$0"; [[ $1 == --help ]]; exit $(($? * 2)) ;;
  esac
  shift
done
(($#)) || { echo "error: again.sh: no command given" >&2; exit 2; }

child='' asked='' missed=''
pass_on() {
  asked=yes
  if [[ -n $child ]]; then kill -s "$1" "$child" 2>/dev/null; else missed=$1; fi
}
end() {
  [[ -z $requeue || $1 != 143 ]] || scontrol requeue "$SLURM_JOB_ID"
  exit "$1"
}
trap 'pass_on TERM' TERM
trap 'pass_on HUP' HUP
# Without job control a shell's background command ignores Ctrl-C, and outlives this script.
set -m
trap 'pass_on INT' INT
for ((start = 1; start <= times; start++)); do
  child=''
  "$@" &
  child=$!
  # It came after the command began and before it had a name here.
  [[ -z $missed ]] || kill -s "$missed" "$child" 2>/dev/null
  # `wait` ends when a signal comes, before the command has saved and ended.
  wait "$child"; code=$?
  while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
  [[ $code == 0 || $code == 2 || $code == 130 || -n $asked ]] && end "$code"
  [[ $code == 143 && -n $requeue ]] && end "$code"
  echo "again.sh: code $code at start $start of $times; again in $wait s" >&2
  sleep "$wait" & child=$!
  wait "$child"
  [[ -n $asked ]] && end 143
done
exit "$code"
