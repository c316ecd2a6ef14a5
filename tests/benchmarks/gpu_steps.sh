#!/usr/bin/env bash
# What psctl does on a GPU: the tests of kernels and engines there, then SDXL and SD3-medium at full size with random
# weights. Steps of mixed batches against plain diffusers one by one and batched by resolution, eager, compiled and with
# CUDA graphs; the same traces under every engine; strips of one image; edits that read records; where the time goes; what
# reuse of patches saves.
#
#     tests/benchmarks/gpu_steps.sh OUT_DIR [MODEL_DIR]
#
# Needs psctl installed with the extra `gpu`, or the repository on PYTHONPATH. About 20 minutes on one H100-class GPU, most
# of it compilation; what is there already is not measured again. ONLY='make-.*|steps-.*' leaves out all parts that it
# does not match. TINY=1 DEVICE=cpu tries the commands on small models (without CUDA graphs).
set -euo pipefail
out=${1:?usage: $0 OUT_DIR [MODEL_DIR]}
models=${2:-/tmp/psctl-random-models}
device=${DEVICE:-cuda}
sizes=${TINY:+64,128,192}
sizes=${sizes:-512,768,1024}
strip_sizes=${TINY:+256}
strip_sizes=${strip_sizes:-1024,2048,3840}
cache_patch=${TINY:+8}
cache_patch=${cache_patch:-32}
prompts=${TINY:+4}
prompts=${prompts:-40}
here=$(dirname "$0")
mkdir -p "$out" "$models"
export PSCTL_WORKSPACE=$out/workspace

part() { # name, seconds at most, command...: a line of the plan, unless it is there or not asked for
    local name=${1#&} and=
    [ "$name" = "$1" ] || and='&'
    [[ $name =~ ^(${ONLY:-.*})$ ]] || return 0
    [ -s "$out/$name.json" ] || echo "$and$name ${*:2}"
}

measure() { part "$@" --output-file "$out/$1.json"; }

plan() {
    part '&kernels' 120 python3 -m pytest -q -n 4 -p no:cacheprovider tests/kernels
    part '&engines' 240 python3 -m pytest -q -n 4 -p no:cacheprovider tests/gpu
    for model in sdxl sd3; do
        [ -f "$models/$model/model_index.json" ] ||
            part "&make-$model" 200 "$here/make_random_model.py" "$model" "$models/$model" ${TINY:+--tiny}
    done
    echo wait
    local few=(--repeats 5 --combinations "'1,0,0;0,0,1;1,1,1;2,2,2;4,4,4'") dtype=float16
    [ "$device" != cpu ] || dtype=float32
    for model in sdxl sd3; do
        local own=(--model "$models/$model" --device "$device" --dtype "$dtype")
        local steps=(psctl bench steps "${own[@]}" --resolutions "$sizes" --quiet)
        measure "steps-$model-$dtype" 120 "${steps[@]}" "${few[@]}"
        [ "$device" = cpu ] || measure "steps-$model-$dtype-graphs" 120 "${steps[@]}" "${few[@]}" --cuda-graphs
        measure "slo-$model-$dtype" 240 psctl bench slo "${own[@]}" --resolutions "$sizes" --quiet --num-prompts "$prompts" \
            --systems diffusers,bucketed,patched-fcfs --rates "${RATES:-1,2,3}" --num-inference-steps 20
        measure "edit-$model-$dtype" 120 "$here/bench_edit_steps.py" "${own[@]}" --side "${sizes##*,}" --batch 4
        measure "breakdown-$model-$dtype" 60 "${steps[@]}" --breakdown
        measure "masks-$model-$dtype" 60 "$here/bench_cache_masks.py" "${own[@]}" --resolutions "$sizes" \
            --cache-patch-size "$cache_patch"
        measure "steps-$model-$dtype-compiled" 300 "${steps[@]}" "${few[@]}" --compile
    done
    measure "strips-sdxl-$dtype" 200 "$here/strip_times.py" --model "$models/sdxl" --device "$device" --dtype "$dtype" \
        --resolutions "$strip_sizes"
    measure steps-sdxl-bfloat16 300 psctl bench steps --model "$models/sdxl" --device "$device" --dtype bfloat16 \
        --resolutions "$sizes" --quiet --repeats 5
}

plan >"$out/plan.txt"
python3 "$here/run_forked.py" "$out" <"$out/plan.txt"
