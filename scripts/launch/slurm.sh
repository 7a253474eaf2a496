#!/usr/bin/env bash
# SLURM: the points of a sweep as one array, or one run on several nodes. --print shows the job and
# submits nothing.
#
#   scripts/launch/slurm.sh [--print] array <file of commands, one a line> [sbatch options ...]
#   scripts/launch/slurm.sh [--print] nodes <number> <ffnh command> ... [-- sbatch options ...]
#
#   ffnh sweep --config=nucl_finetune:gemma2_2b,gsm8k --sweep=alpha --workdir=runs/alpha --print > points
#   scripts/launch/slurm.sh array points --ntasks=1 --gpus-per-task=1 --time=24:00:00
#   scripts/launch/slurm.sh nodes 4 train --config=nucl_finetune:gemma2_9b,gsm8k \
#       --workdir=runs/nucl -- --gpus-per-node=8 --ntasks-per-node=8
#
# A job that is preempted or runs out of time saves (SIGTERM two minutes before) and is queued again.
set -euo pipefail
show=''
if [[ ${1-} == --print ]]; then show=yes; shift; fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
common=(--requeue --open-mode=append)

submit() { # <job> <sbatch options ...>
  local job=$1; shift
  if [[ -n $show ]]; then
    printf '%q ' sbatch "${common[@]}" "$@"; printf '\n%s\n' "$job"
  else
    sbatch "${common[@]}" "$@" <<<"$job"
  fi
}

case ${1-} in
  array)
    points=$(realpath "${2:?a file of commands, one a line}")
    while IFS= read -r line || [[ $line ]]; do
      bash -nc "$line" 2>/dev/null || { echo "error: $points: this line is no whole command: $line" >&2; exit 2; }
    done <"$points"
    count=$(grep -c . "$points") || { echo "error: $points holds no command" >&2; exit 2; }
    submit "#!/usr/bin/env bash
cd $(printf %q "$PWD")
exec $(printf %q "$here/again.sh") --requeue bash -c \"exec \$(grep . $(printf %q "$points") | sed -n \"\${SLURM_ARRAY_TASK_ID}p\")\"" \
      --signal=B:TERM@120 --array="1-$count" "${@:3}" ;;
  nodes)
    number=${2:?a number of nodes}; shift 2
    [[ $number =~ ^[1-9][0-9]*$ ]] || { echo "error: nodes $number: a number is expected, for example 4" >&2; exit 2; }
    command=() options=()
    while (($#)) && [[ $1 != -- ]]; do command+=("$1"); shift; done
    (($#)) && shift && options=("$@")
    ((${#command[@]})) || { echo "error: nodes $number what? for example: train --config=..." >&2; exit 2; }
    submit "#!/usr/bin/env bash
cd $(printf %q "$PWD")
exec $(printf %q "$here/again.sh") --requeue srun --kill-on-bad-exit=1 ffnh $(printf '%q ' "${command[@]}")--distributed=auto" \
      --signal=TERM@120 --nodes="$number" "${options[@]}" ;;
  *) sed -n '2,14s/^# \{0,1\}//p' "$0"; [[ ${1-} == --help ]] || exit 2 ;;
esac
