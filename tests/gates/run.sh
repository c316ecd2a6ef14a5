#!/usr/bin/env bash
# Draws images with the bundled models, measures them with psctl and holds them to tests/gates/gates.toml.
#
#   tests/gates/run.sh [FOLDER] [--update-baseline]
#
# FOLDER (default: psctl-workspace/gate) is made anew: images of an older version of the code would be judged for this
# one. It gets a folder for each model with the results and gates.xml (JUnit) and gates.md.
# Exit code: that of psctl gate, 1 if a gate fails on any model, else 3 if one has not enough evidence.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PSCTL=$PWD/.venv/bin/psctl
GATES=$PWD/tests/gates
FOLDER=${1:-psctl-workspace/gate}
UPDATE=${2:-}
# Settings of a developer's own runs, such as PSCTL_MODEL, are not to be judged.
for name in $(compgen -e PSCTL_ || true); do unset "$name"; done
export HF_HUB_OFFLINE=1
# What a folder that is not ours holds must not be lost.
if [ -d "$FOLDER" ] && [ ! -e "$FOLDER/.psctl-gate" ] && [ -n "$(ls -A "$FOLDER")" ]; then
    echo "$FOLDER is not empty and was not made by tests/gates/run.sh; name another folder" >&2
    exit 2
fi
rm -rf "$FOLDER"
mkdir -p "$FOLDER"
touch "$FOLDER/.psctl-gate"
cd "$FOLDER"

verdict=0
for model in emoji-xl emoji-3; do
    mkdir "$model"
    cp "$GATES/gates.toml" "$model"
    echo "== $model: drawn by plain diffusers, by the patch engine, with the patch cache, with a schedule, and in fp8"
    eval=("$PSCTL" eval clip --model "$model" --dtype float32 --resolutions 128,192 --seed 0 --workspace workspace
          --quiet)
    short=("${eval[@]}" --num-prompts 12 --num-inference-steps 20)
    own=("${eval[@]}" --num-prompts 24)
    compare=("$PSCTL" eval compare --metrics psnr,ssim,lpips --workspace workspace --quiet)
    "${short[@]}" --engine plain --images "$model/plain" >/dev/null
    "${short[@]}" --images "$model/patched" --output-file "$model/clip.json" >/dev/null
    # As users get them: by the predictor and the schedule that come with the model, in as many steps as it takes.
    "${own[@]}" --images "$model/own-steps" >/dev/null
    "${own[@]}" --cache patch --images "$model/cache" >/dev/null
    "${own[@]}" --cache schedule --images "$model/schedule" >/dev/null
    "${short[@]}" --quantize fp8 --images "$model/fp8" >/dev/null
    "${compare[@]}" "$model/plain" "$model/patched" --output-file "$model/exact.json" >/dev/null
    "${compare[@]}" "$model/own-steps" "$model/cache" --output-file "$model/cached.json" >/dev/null
    "${compare[@]}" "$model/own-steps" "$model/schedule" --output-file "$model/scheduled.json" >/dev/null
    "${compare[@]}" "$model/patched" "$model/fp8" --output-file "$model/fp8.json" >/dev/null
    code=0
    "$PSCTL" gate "$model/gates.toml" --baseline "$GATES/baseline-$model.json" \
        --junit "$model/gates.xml" --markdown "$model/gates.md" ${UPDATE:+"$UPDATE"} || code=$?
    case $code in
        0) ;;
        1) verdict=1 ;;
        3) [ "$verdict" = 1 ] || verdict=3 ;;
        *) exit "$code" ;;
    esac
done
exit "$verdict"
