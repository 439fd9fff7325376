#!/usr/bin/env bash
# Measure the drafts that make.sh made: one file of figures for each table of docs/benchmarks.md. Then run page.py.
#
#   examples/real_model/measure.sh WORK BENCHMARK RESULTS [PROMPTS PER CATEGORY [DTYPE ...]]
#   examples/real_model/measure.sh ~/smollm2 spec_bench.jsonl examples/real_model/results 2 bfloat16 float32
#
# After an interruption, the same command continues after the last batch of prompts. A table whose file is in RESULTS is left out:
# remove the file to measure other drafts. Use a machine that does nothing else.
# THREADS=2 sets the number of threads. MORE="--compiled" passes further options to hf-spec bench. KIND="-other-tasks" is added
# to each file's name, for another BENCHMARK.
set -euo pipefail
mkdir -p "$3"
benchmark=$(realpath "$2") results=$(realpath "$3") each=${4:-2}
cd "$1"
shift 4 || shift $#
dtypes=("$@")
[ ${#dtypes[@]} -gt 0 ] || dtypes=(bfloat16 float32)
drafts=(ngram history) # keywords; drafts are directories, named ./mtp because mtp alone is a keyword, too
for kind in eagle3-new eagle3-more eagle3; do # the latest one that exists
    [ ! -e "$kind/finished" ] || { drafts+=("./$kind" "history+./$kind") && break; }
done
for kind in dspark medusa mtp vanilla; do
    [ ! -e "$kind/finished" ] || drafts+=("./$kind")
done
mkdir -p rounds
for dtype in "${dtypes[@]}"; do
    for batch in 1 8; do
        count=$((each > batch ? each : batch)) # prompts per category
        for temperature in 0 0.6 1; do
            for length in auto own; do
                # For comparison, the first table also in float32 and with each draft's own draft length.
                [ "$dtype-$length" = bfloat16-auto ] || [ "$batch-$temperature" = 1-0 ] || continue
                name=$dtype-batch$batch-temperature$temperature-$count-$length${KIND:-}
                if [ -e "$results/$name.json" ]; then
                    echo "$name.json is there and not measured again: remove it to do so" >&2
                    continue
                fi
                [ "$length" = own ] && fixed=() || fixed=(--num-speculative-tokens auto)
                hf-spec bench HuggingFaceTB/SmolLM2-135M-Instruct --draft "${drafts[@]}" --prompts "$benchmark" \
                    --dtype "$dtype" --prompts-per-category "$count" --batch-size "$batch" \
                    --temperature "$temperature" --max-new-tokens 128 --rounds "rounds/$name.jsonl" \
                    --json "$name.json.part" --threads "${THREADS:-2}" ${fixed[@]+"${fixed[@]}"} ${MORE:-}
                mv "$name.json.part" "$results/$name.json"
            done
        done
    done
done
