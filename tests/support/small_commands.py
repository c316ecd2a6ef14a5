"""Options that make the commands in README and docs small, and files that pages need."""

SIZES = "64,128"  # the cache's patches are 64 px wide
DRAWING = {"--num-prompts": "2", "--num-inference-steps": "2", "--resolutions": SIZES}
TINY: dict[str, dict[str, str]] = {
    "generate": {"--num-inference-steps": "4"},
    "edit": {"--num-inference-steps": "4"},
    "templates add": {"--num-inference-steps": "4"},
    "templates list": {},
    "templates check": {},
    "serve": {"--num-prompts": "3", "--num-inference-steps": "2", "--resolutions": SIZES, "--request-rate": "20"},
    "simulate": {"--num-prompts": "40"},
    "profile": {},
    "profile latency": {
        "--combinations": "14", "--repeats": "1", "--max-batch-size": "4", "--resolutions": SIZES,
    },
    "profile blocks": {"--num-prompts": "4", "--batch-size": "4", "--num-inference-steps": "7", "--resolutions": SIZES},
    "profile edits": {"--combinations": "13", "--repeats": "1", "--max-batch-size": "2", "--resolutions": SIZES},
    "profile parallel": {"--resolutions": "128", "--num-ranks": "2"},
    "train-predictor": {},
    "train-predictor latency": {},
    "train-predictor cache": {"--trees": "4", "--depth": "4"},
    "train-predictor schedule": {"--num-prompts": "4", "--steps": "4"},
    "train-predictor discriminator": {"--num-prompts": "40", "--steps": "2", "--resolutions": "64"},
    "profile cascade": {"--num-prompts": "4", "--batch-sizes": "1,2", "--resolutions": SIZES},
    "eval discriminators": {"--num-resamples": "2", "--num-draws": "2"},
    "bench cascade": {"--rate-range": "20:40", "--duration": "1", "--num-resamples": "2"},
    "bench slo": {
        "--num-prompts": "2", "--duration": "0.2", "--rates": "20", "--num-seeds": "1", "--num-inference-steps": "24",
        "--resolutions": SIZES, "--warmup-requests": "1", "--combinations": "6", "--max-batch-size": "3",
    },
    "batch run": {},
    "bench serve": {
        "--num-prompts": "3", "--num-inference-steps": "2", "--resolutions": SIZES, "--request-rate": "20",
        "--warmup-requests": "1",
    },
    "bench steps": {"--combinations": "1,1", "--repeats": "1", "--warmup": "1", "--resolutions": SIZES},
    "bench parallel": {"--repeats": "1", "--warmup": "1", "--resolutions": "64", "--modes": "cfg,sync"},
    "bench edit": {
        "--mask-ratios": "0.05", "--num-edits": "2", "--templates": "1", "--num-inference-steps": "2", "--repeats": "1",
        "--resolutions": SIZES,
    },
    "eval parallel": {
        "--num-prompts": "2", "--num-inference-steps": "2", "--resolutions": "64", "--num-ranks": "2",
        "--parts": "table1",
    },
    "bench cache": {
        "--combinations": "1,1", "--rounds": "1", "--num-inference-steps": "6", "--resolutions": SIZES,
        "--image-thresholds": "", "--intervals": "2", "--sums": "", "--num-real": "2",
    },
    "reproduce patchedserve": {"--quick": "true", "--resolutions": SIZES},
    "eval all": DRAWING,
    "eval fid": DRAWING,
    "eval clip": DRAWING,
    "eval psnr": DRAWING,
    "eval compare": DRAWING,
    "eval report": {},
    "gate": {},
    "demo": {"--duration": "0.5", "--num-inference-steps": "2"},
    "doctor": {},
    "config check": {},
    "models card": {"--num-pairs": "15"},
    "models train": {"--steps": "2"},
}  # fmt: skip
"""Options by command. A command that is missing here is not executed, and so must not be printed."""
CASCADES = {"train-predictor discriminator", "profile cascade", "bench cascade", "eval discriminators"}
"""Commands with two models, for which a tiny one is used with one step and with two."""
THRESHOLDS = {"train-predictor cache": "--threshold", "bench cache": "--thresholds"}
"""Options set to the median change of the profile: the changes of random weights differ from those of trained ones."""
PREDICTORS = {
    "cache.safetensors": ({"--trained", "--cache patch", "patchedserve"}, ("profile blocks", "train-predictor cache")),
    "cache-schedule.json": ({"patched-schedule"}, ("train-predictor schedule --target-ssim 0.05",)),
    "latency.safetensors": (
        {"patched-slack", "patched-schedule", "patchedserve"},
        ("profile latency", "train-predictor latency"),
    ),
}
"""Files that pages need and other pages make: the words that need them, and the command that makes them."""
SCRIPTS = {
    "tests/benchmarks/bench_adapters.py": ["--repeats", "1", "--model", "emoji-xl"],
    "tests/benchmarks/bench_cache_shapes.py": ["--widths", "1", "--sides", "64", "--repeats", "1"],
    "tests/benchmarks/bench_controls.py": ["--repeats", "1", "--model", "emoji-xl"],
    "tests/benchmarks/bench_fid.py": ["--images", "3"],
    "tests/benchmarks/cascade_runs.py": ["--runs", "5"],
    "tests/benchmarks/launches.py": ["--families", "sdxl"],
    "tests/benchmarks/model_weights.py": [],
    "tests/benchmarks/paired_points.py": [],
    "tests/benchmarks/policies.py": ["--kinds", "poisson", "--loads", "1", "--seeds", "1", "--num-prompts", "20"],
    "tests/benchmarks/edit_plans.py": ["--instances", "2", "--output-file", "plans.json"],
    "tests/benchmarks/edit_reliability.py": ["--kills", "1", "--damages", "1", "--edits", "6", "--templates", "2"],
    "tests/benchmarks/edit_routing.py": ["--requests", "20", "--seeds", "1", "--output-file", "routing.json"],
    "tests/benchmarks/make_random_model.py": ["--tiny"],
    "tests/benchmarks/bench_records.py": ["--requests", "20", "--output-file", "records.json"],
    "tests/benchmarks/bench_simulator_scale.py": [
        "--num-prompts", "20", "--minutes", "0.02", "--real-minutes", "0.01", "--steps", "2",
        "--output-file", "scale.json",
    ],
    # Commands that load bundled models, or servers for minutes; the suite tests their parts.
    **{
        f"tests/benchmarks/{name}.py": ["--help"]
        for name in (
            "bench_edit_steps", "bench_http", "bench_http_simulated", "bench_http_slo", "bench_stages", "cache_rivals",
            "cascade_mix", "cascade_reuse", "edit_latency", "edit_link", "edit_quality", "fuzz_http", "http_parity",
            "kill_http", "soak", "strip_times", "wrong_tables",
        )
    },
}  # fmt: skip
GATE_CODES = (0, 1, 3)
"""`psctl gate` may give any verdict on two images of random weights; wrong usage is 2."""
