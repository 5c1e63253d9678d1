#!/usr/bin/env bash
# The whole pipeline with one command: set-up, stages 00 to 60 in order, three variants of every trained
# stage with their exact checks, the result table. `bash run_all.sh --help` lists what there is.
set -euo pipefail
caller="$PWD"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here"

usage() {
    cat <<'HELP'
bash run_all.sh [smollm2|tiny|qwen] [options]     run the pipeline
bash run_all.sh verify [run folder]               recompute a run's hashes and figures, train nothing
bash run_all.sh report [run folder]               write a run's report.html and report.md again
bash run_all.sh exercise NAME [options]           an experiment of the lesson: perfect-judge, rounds, brakes, pooling,
                                                  calibration, length-hack, two-rewards, kl-sweep
                                                  (exercises: all but brakes, the longest)
bash run_all.sh test [pytest arguments]           set up and run the tests

  profile   base model                        time       memory     disk
  tiny      made here, 0.8 M parameters       2 min      1.2 GiB    0.1 GB
  smollm2   SmolLM2-135M-Instruct (default)   26 min     6.4 GiB    1.1 GB
  qwen      Qwen2.5-0.5B-Instruct             not measured as a whole (see the README)
  test                                        14 min     4 GiB      0.4 GB

  Times are for two CPU cores, smollm2's with set-up and download, tiny's without making its model once; memory is the sum of the two processes that run side
  by side; disk is models/ and runs/ without the virtual environment (1.3 GB with a CPU build of torch).

options
  --run-dir DIR     run folder (default: runs/<profile>)
  --model-dir DIR   a local folder with the base model instead of a download
  --profile NAME    of an exercise: smollm2 (default), tiny or qwen
  --data DIR        your own preference pairs instead of the built-in corpus (the README shows the files)
  --rubric FILE.py  their rubric
  --drop-bad, --no-chat-template, --system TEXT, --prompt-limit N, --response-limit N, --context-limit N
                    as in 00_prepare.py --help
  --redo            remove results whose inputs have changed and make them again
  --fresh           start anew in a new folder (runs/<profile>-2, -3, ...); the old run stays
  --help            this text

A finished stage whose inputs are unchanged is skipped. Ctrl-C saves and stops; after that, as after a
crash or a power cut, the same command (after --fresh: the one that is printed) goes on from there.
HELP
}

say() { printf '\n== %s\n' "$*"; }

absolute() { # a folder as the caller meant it, without a slash at the end
    case "$1" in /*) ;; *) set -- "$caller/$1" ;; esac
    printf '%s' "${1%/}"
}

# ---- arguments ------------------------------------------------------------------------------------

mode=smollm2
if [ $# -gt 0 ]; then
    case "$1" in
        smollm2 | tiny | qwen | verify | report | exercise | exercises | test) mode="$1"; shift ;;
        --help | -h) usage; exit 0 ;;
        --*) ;;
        *) echo "run_all.sh: unknown command '$1'; bash run_all.sh --help lists them" >&2; exit 2 ;;
    esac
fi
run_dir="" prepare=() redo=() fresh="" profile="$mode" exercises=()
case "$mode" in
    exercise)
        [ $# -ge 1 ] || { echo "run_all.sh: exercise needs a name; --help lists them" >&2; exit 2; }
        exercises=("$1") profile=smollm2; shift ;;
    exercises) exercises=(perfect-judge rounds pooling calibration length-hack two-rewards kl-sweep) profile=smollm2 ;;
esac
if [ "$mode" = verify ] || [ "$mode" = report ]; then
    [ $# -le 1 ] || { echo "run_all.sh: $mode takes one run folder" >&2; exit 2; }
    run_dir="$(absolute "${1:-$here/runs/smollm2}")"
elif [ "$mode" != test ]; then
    while [ $# -gt 0 ]; do
        case "$1" in
            --run-dir | --model-dir | --data | --rubric)
                [ $# -ge 2 ] || { echo "run_all.sh: $1 needs a folder or file" >&2; exit 2; }
                if [ "$1" = --run-dir ]; then run_dir="$(absolute "$2")"; else prepare+=("$1" "$(absolute "$2")"); fi
                shift 2 ;;
            --profile)
                [ $# -ge 2 ] && [ ${#exercises[@]} -gt 0 ] ||
                    { echo "run_all.sh: --profile NAME belongs to an exercise" >&2; exit 2; }
                profile="$2"; shift 2 ;;
            --prompt-limit | --response-limit | --context-limit | --system)
                [ $# -ge 2 ] || { echo "run_all.sh: $1 needs a value" >&2; exit 2; }
                prepare+=("$1" "$2"); shift 2 ;;
            --drop-bad | --no-chat-template) prepare+=("$1"); shift ;;
            --redo) redo=(--redo); shift ;;
            --fresh) fresh=yes; shift ;;
            --help | -h) usage; exit 0 ;;
            *) echo "run_all.sh: unknown option '$1'; bash run_all.sh --help lists them" >&2; exit 2 ;;
        esac
    done
fi

# ---- set-up: an own .venv, once per requirements file ---------------------------------------------

setup() { # $1: requirements file
    if [ ! -x .venv/bin/python ]; then
        local python=""
        for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
            if command -v "$candidate" >/dev/null &&
                "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
                python="$candidate"; break
            fi
        done
        [ -n "$python" ] || { echo "run_all.sh: no Python 3.10 or newer was found" >&2; exit 1; }
        say "creating .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    local stamp=".venv/installed-$1"
    if ! cmp -s <(cat requirements*.txt) "$stamp"; then
        say "installing $1"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$1" ||
            { echo "run_all.sh: pip install -r $1 failed" >&2; exit 1; }
        cat requirements*.txt >"$stamp"
    fi
}

if [ "$mode" = test ]; then
    setup requirements-dev.txt
    .venv/bin/python -m ruff check .
    exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
fi
setup requirements.txt
python="$here/.venv/bin/python"
case "$mode" in
    verify) exec "$python" -m kernel.finished.verify "$run_dir" ;;
    report) exec "$python" -m kernel.report.page "$run_dir" ;;
esac

run_dir="${run_dir:-$here/runs/$profile}"
if [ ${#exercises[@]} -gt 0 ]; then
    [ ${#prepare[@]} -eq 0 ] && [ -z "$fresh" ] ||
        { echo "run_all.sh: an exercise takes --profile, --run-dir and --redo only" >&2; exit 2; }
    exec "$python" -m kernel.lesson.exercises "$run_dir" "${exercises[@]}" --profile "$profile" ${redo[@]+"${redo[@]}"}
fi

# ---- run folder: one owner at a time --------------------------------------------------------------

if [ -n "$fresh" ] && [ -e "$run_dir" ]; then
    number=2
    while [ -e "$run_dir-$number" ]; do number=$((number + 1)); done
    run_dir="$run_dir-$number"
fi
say "run folder: $run_dir"
mkdir -p "$run_dir" && exec 9<>"$run_dir/.lock" ||
    { echo "run_all.sh: cannot write to $run_dir" >&2; exit 1; }
"$python" -m kernel.run.lock 9 "$run_dir"
export RUN_LOCK_FD=9 # the stages work under this lock
trap ': >"$run_dir/.lock"' EXIT

# ---- stages ---------------------------------------------------------------------------------------

flags=(--profile "$mode" --run-dir "$run_dir")

failed() { # stage, status
    local again="bash run_all.sh $mode --run-dir '$run_dir'"
    [ ${#prepare[@]} -eq 0 ] || again="$again$(printf ' %q' "${prepare[@]}")"
    [ ${#redo[@]} -eq 0 ] || again="$again --redo"
    if [ "$2" -eq 130 ]; then
        echo "run_all.sh: stopped in $1; to go on: $again" >&2
    elif [ "$2" -gt 128 ]; then
        echo "run_all.sh: $1 was killed by signal $(($2 - 128)); to go on from its newest state: $again" >&2
    else
        echo "run_all.sh: $1 failed with status $2" >&2
    fi
    exit "$2"
}

program() { "$python" "$1.py" "${flags[@]}" ${redo[@]+"${redo[@]}"} "${@:2}"; }

stage() { # stage name, further arguments
    local status=0
    say "$*"
    program "$@" || status=$?
    [ "$status" -eq 0 ] || failed "$1" "$status"
}

# A trained stage runs twice side by side, one core each: continuous here, interrupt and resume beside it
# (their output goes to a log); then the two must be equal bit for bit.
trained() { # stage name
    local name="$1" log="$run_dir/outputs/$1/interrupt_resume.log" lanes status=0 stopped=""
    mkdir -p "$(dirname "$log")"
    say "$name: continuous; beside it interrupt and resume (log: $log)"
    "$python" -m kernel.run.lanes "$log" "$name" "${flags[@]}" ${redo[@]+"${redo[@]}"} &
    lanes=$!
    trap 'stopped=yes; kill -TERM "$lanes" 2>/dev/null || true' INT TERM HUP
    # a trap ends `wait` early; the lanes are still saving then
    while true; do
        status=0
        wait "$lanes" || status=$?
        kill -0 "$lanes" 2>/dev/null || break
    done
    trap - INT TERM HUP
    [ -z "$stopped" ] || failed "$name" 130
    [ "$status" -eq 0 ] || failed "$name" "$status"
    stage "$name" --variant check
}

stage 00_prepare ${prepare[@]+"${prepare[@]}"}
trained 10_sft
trained 20_reward
trained 30_ppo
stage 40_generate
stage 50_evaluate
stage 60_probe
# the stage ends with its report; a run that was stopped just before has none yet
[ -f "$run_dir/outputs/60_probe/report.html" ] || "$python" -m kernel.report.page "$run_dir"
cat "$run_dir/outputs/50_evaluate/table.md"
say "done: open $run_dir/outputs/60_probe/report.html"
