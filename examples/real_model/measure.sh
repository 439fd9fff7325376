#!/usr/bin/env bash
# Measure the drafts that make.sh made: one file of figures for each table of docs/benchmarks.md. Then run page.py.
#
#   examples/real_model/measure.sh WORK BENCHMARK RESULTS [PROMPTS PER CATEGORY [DTYPE ...]]
#   examples/real_model/measure.sh ~/smollm2 spec_bench.jsonl examples/real_model/results 2 bfloat16 float32
#
# Kill it whenever you like: the same command goes on behind the last batch of prompts. Leave the machine alone meanwhile.
# THREADS=2 computes with so many. MORE="--compiled" passes further options to hf-spec bench. KIND="-other-tasks" stands at the
# end of each file's name, for another BENCHMARK.
set -euo pipefail
mkdir -p "$3"
benchmark=$(realpath "$2") results=$(realpath "$3") each=${4:-2}
cd "$1"
shift 4 || shift $#
dtypes=("$@")
[ ${#dtypes[@]} -gt 0 ] || dtypes=(bfloat16 float32)
drafts=(ngram memory) # words; drafts are directories, and mtp alone would be a word, too
for kind in eagle3-new eagle3-more eagle3; do # the latest one there is
    [ ! -e "$kind/finished" ] || { drafts+=("./$kind" "memory+./$kind") && break; }
done
for kind in dspark medusa mtp vanilla; do
    [ ! -e "$kind/finished" ] || drafts+=("./$kind")
done
mkdir -p rounds
for dtype in "${dtypes[@]}"; do
    for batch in 1 8; do
        for temperature in 0 0.6 1; do
            for depth in auto own; do
                # In float32, and with each draft's own number of guesses, which are for comparison, the first table only.
                [ "$dtype-$depth" = bfloat16-auto ] || [ "$batch-$temperature" = 1-0 ] || continue
                name=$dtype-batch$batch-temperature$temperature-$each-$depth${KIND:-}
                [ ! -e "$results/$name.json" ] || continue
                [ "$depth" = own ] && depth=() || depth=(--num-speculative-tokens auto)
                hf-spec bench HuggingFaceTB/SmolLM2-135M-Instruct --draft "${drafts[@]}" --prompts "$benchmark" \
                    --dtype "$dtype" --prompts-per-category $((each > batch ? each : batch)) --batch-size "$batch" \
                    --temperature "$temperature" --max-new-tokens 128 --rounds "rounds/$name.jsonl" \
                    --json "$name.json.part" --threads "${THREADS:-2}" ${depth[@]+"${depth[@]}"} ${MORE:-}
                mv "$name.json.part" "$results/$name.json"
            done
        done
    done
done
