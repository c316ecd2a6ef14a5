#!/usr/bin/env bash
# Steps of SDXL and SD3-medium at full size with random weights on a GPU: plain diffusers one by one and batched by
# resolution against the patch engine; eager, compiled, and with CUDA graphs; where the time goes; and what reuse saves,
# of steps and of edits.
#
#     tests/benchmarks/gpu_steps.sh OUT_DIR [MODEL_DIR]
#
# Needs psctl installed with the extra `gpu`. About 25 minutes on one H100-class GPU, most of it compilation; parts that
# are there already are not measured again. TINY=1 DEVICE=cpu tries the commands on small models (without CUDA graphs).
set -euo pipefail
out=${1:?usage: $0 OUT_DIR [MODEL_DIR]}
models=${2:-/tmp/psctl-random-models}
device=${DEVICE:-cuda}
sizes=${TINY:+64,128,192}
sizes=${sizes:-512,768,1024}
cache_patch=${TINY:+8}
cache_patch=${cache_patch:-32}
here=$(dirname "$0")
mkdir -p "$out" "$models"
export PSCTL_WORKSPACE=$out/workspace

measure() { # name, command...
    local file=$out/$1.json
    shift
    [ -s "$file" ] && return
    "$@" --output-file "$file" --quiet
}

for model in sdxl sd3; do
    [ -f "$models/$model/model_index.json" ] ||
        python "$here/make_random_model.py" "$model" "$models/$model" ${TINY:+--tiny}
    for dtype in float16 bfloat16; do
        common=(psctl bench steps --model "$models/$model" --device "$device" --dtype "$dtype" --resolutions "$sizes")
        measure "steps-$model-$dtype" "${common[@]}" --repeats 5
        [ "$dtype" = float16 ] || continue
        few=(--repeats 5 --combinations "1,0,0;0,0,1;1,1,1;2,2,2;4,4,4")
        measure "steps-$model-$dtype-compiled" "${common[@]}" "${few[@]}" --compile
        if [ "$device" != cpu ]; then
            measure "steps-$model-$dtype-graphs" "${common[@]}" "${few[@]}" --cuda-graphs
        fi
        measure "breakdown-$model-$dtype" "${common[@]}" --breakdown
        python "$here/bench_cache_masks.py" --model "$models/$model" --device "$device" --dtype "$dtype" \
            --resolutions "$sizes" --cache-patch-size "$cache_patch" --output-file "$out/masks-$model-$dtype.json"
        [ -s "$out/edit-$model-$dtype.json" ] ||
            python "$here/bench_edit_steps.py" --model "$models/$model" --device "$device" --dtype "$dtype" \
                --side "${sizes##*,}" --batch 4 --output-file "$out/edit-$model-$dtype.json"
    done
done
