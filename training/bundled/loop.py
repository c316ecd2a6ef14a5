"""The training loop of all bundled models: schedule, moving average, checkpoints that resume exactly, a log.

The learning rate warms up, stays constant, and decays as a half cosine over the last part of the run. Just before the
decay, the state is saved as `stable.safetensors`, from which a finished run can be extended.
Batches depend on (seed, step) only, so a resumed run sees the same batches as an uninterrupted one.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...data.errors import RunError, UsageError
from ...data.files import atomic_write
from ...kernels.launch import has_fast_bfloat16
from .continuation import load_initial_weights
from .optim import MuonAdamW, OptimConfig, hidden_matrices

Loss = Callable[[int], tuple[Tensor, dict[str, float]]]
"""Returns the loss of the batch of a step (the argument), and figures to log."""
OnStep = Callable[[int, dict[str, float]], None]
"""Called with the number of a finished step and its figures."""


def mixed_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that computes in bfloat16 where that is fast; elsewhere a step of the U-Net would take ten times
    as long with it.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=has_fast_bfloat16(device))


def ignore_step(step: int, figures: dict[str, float]) -> None:
    """An `OnStep` that does nothing."""


@dataclass(frozen=True, slots=True)
class Task:
    """Settings of one training.

    Attributes:
        folder: folder for its checkpoints and its log.
        steps: length of the whole schedule.
        seed: seed of initial weights, batches and noise.
        initial_weights: weights of a finished model to start from; None for random weights.
    """

    folder: Path
    steps: int
    seed: int = 0
    initial_weights: Path | None = None


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Configuration of the loop. Only `steps` may differ between a checkpoint and the run that resumes it.

    Attributes:
        started_from: sha256 of the weights that the run began with; "" if they were random.
    """

    steps: int
    seed: int = 0
    started_from: str = ""
    warmup_steps: int = 50
    decay_fraction: float = 0.35
    ema_decay: float = 0.998
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"steps is {self.steps}; it must be at least 1")

    @property
    def decay_start(self) -> int:
        return self.steps - round(self.steps * self.decay_fraction)

    def lr_scale(self, step: int) -> float:
        """Learning rate of a step (counted from 0) as a fraction of the peak."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        if step < self.decay_start:
            return warm
        progress = (step - self.decay_start) / max(1, self.steps - self.decay_start)
        return warm * (0.5 + 0.5 * math.cos(math.pi * progress))


class TrainingRun:
    """A network in training, with the whole state of its checkpoints.

    Args:
        model: trained in place, in fp32 (its losses may use autocast).
        config: length, seed, learning rates and averaging.
        folder: folder of the checkpoints `last.safetensors` and `stable.safetensors` and of the log `log.jsonl`.
        is_excluded: whether AdamW instead of Muon trains a weight matrix, by name (first and last layers, embeddings).
    """

    def __init__(self, model: nn.Module, config: LoopConfig, folder: Path, is_excluded: Callable[[str], bool]) -> None:
        self.model, self.config, self.folder = model, config, folder
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        muon_names = [name for name in hidden_matrices(model, is_excluded) if name in parameters]
        self.optimiser = MuonAdamW(parameters, muon_names, config.optim)
        self.ema = {name: p.detach().clone() for name, p in parameters.items()}
        self.step = 0
        self._is_cut_short = False
        self.folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    def run(
        self,
        loss_of: Loss,
        *,
        on_step: OnStep = ignore_step,
        checkpoint_every_s: float = 120.0,
    ) -> None:
        """Train to the end of the schedule.

        On Ctrl-C the current step is completed, a checkpoint is written and KeyboardInterrupt is raised.
        """
        saved_at = time.monotonic()
        if self._is_cut_short and self.step > self.config.decay_start:
            # The run resumes after the point at which this checkpoint would have been saved.
            self.save("stable")
        with _recorded_interrupts() as interrupts:
            try:
                while self.step < self.config.steps and not interrupts:
                    if self.step == self.config.decay_start:
                        self.save("stable")
                    figures = self._train_step(loss_of)
                    on_step(self.step, figures)
                    if time.monotonic() - saved_at > checkpoint_every_s:
                        self.save("last")
                        saved_at = time.monotonic()
            finally:
                self.save("last")
        if interrupts:
            raise KeyboardInterrupt

    def copy_ema_to(self, model: nn.Module) -> None:
        """Put the moving average of the weights into a model of the same architecture."""
        missing = set(self.ema) - {name for name, _ in model.named_parameters()}
        assert not missing, missing
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.ema.get(name, parameter))

    def save(self, which: str) -> None:
        tensors = {f"model.{name}": p.detach() for name, p in self.optimiser.parameters.items()}
        tensors |= {f"ema.{name}": tensor for name, tensor in self.ema.items()}
        tensors |= {f"optim.{name}": tensor for name, tensor in self.optimiser.state_tensors().items()}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        metadata = {"step": str(self.step), "config": json.dumps(asdict(self.config))}
        with atomic_write(self.folder / f"{which}.safetensors") as temporary:
            save_file(tensors, temporary, metadata=metadata)

    def _train_step(self, loss_of: Loss) -> dict[str, float]:
        loss, figures = loss_of(self.step)
        loss.backward()
        if not torch.isfinite(loss):
            raise RunError(f"the loss became {float(loss.detach())} at step {self.step}; lower the learning rate")
        figures["loss"] = float(loss.detach())
        figures["grad_norm"] = self.optimiser.step(self.config.lr_scale(self.step))
        self.step += 1
        self._update_ema()
        if self.step % 20 == 0:
            with (self.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps({"step": self.step, "time": round(time.time(), 1)} | _rounded(figures)) + "\n")
        return figures

    def _update_ema(self) -> None:
        # The average follows quickly at first, so that the random start is forgotten.
        decay = min(self.config.ema_decay, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            averages = list(self.ema.values())
            torch._foreach_lerp_(averages, [p.detach() for p in self.optimiser.parameters.values()], 1 - decay)

    def _resume(self) -> None:
        """Continue from the newest checkpoint that fits the schedule; a longer run resumes from before the decay."""
        last, stable = (self.folder / f"{which}.safetensors" for which in ("last", "stable"))
        paths = [path for path in (last, stable) if path.exists()]
        for path in paths:
            try:
                with safe_open(path, "pt") as file:
                    metadata = file.metadata() or {}
                    if not {"config", "step"} <= metadata.keys():
                        raise RunError(f"{path} is not a checkpoint of a training; delete it to start again")
                    saved = json.loads(metadata["config"])
                    step = int(metadata["step"])
                    self._check_same(path, saved)
                    # Everything except the length is equal, so the schedule of the saved run follows from its length.
                    has_decayed = path == last and step > replace(self.config, steps=saved["steps"]).decay_start
                    if saved["steps"] != self.config.steps and has_decayed:
                        continue
                    if step > self.config.steps:
                        raise UsageError(
                            f"{path} is at step {step} already, but {self.config.steps} steps are asked for; "
                            "ask for more, or use another folder"
                        )
                    self._is_cut_short = saved["steps"] > self.config.steps
                    self._load({name: file.get_tensor(name) for name in file.keys()}, step)  # noqa: SIM118
                return
            except SafetensorError as error:
                raise RunError(f"{path} is not a whole checkpoint ({error}); delete it to start again") from error
        if paths:
            raise UsageError(
                f"{paths[0]} has begun to lower its learning rate, and no checkpoint from before that is left; ask for "
                "the same number of steps, or delete it to start again"
            )

    def _check_same(self, path: Path, saved: dict[str, object]) -> None:
        wanted = json.loads(json.dumps(asdict(self.config)))
        changed = [key for key in wanted if key != "steps" and saved.get(key) != wanted[key]]
        if changed:
            changes = ", ".join(f"{key} {saved.get(key)} -> {wanted[key]}" for key in changed)
            raise UsageError(f"{path} was made with another configuration ({changes}); use another folder")

    def _load(self, tensors: dict[str, Tensor], step: int) -> None:
        with torch.no_grad():
            for name, parameter in self.optimiser.parameters.items():
                parameter.copy_(tensors[f"model.{name}"])
                self.ema[name].copy_(tensors[f"ema.{name}"])
        optim = {name.removeprefix("optim."): tensor for name, tensor in tensors.items() if name.startswith("optim.")}
        self.optimiser.load_state_tensors(optim, step)
        self.step = step


def train(
    model: nn.Module,
    task: Task,
    device: torch.device,
    loss_of: Loss,
    on_step: OnStep,
    *,
    is_excluded: Callable[[str], bool],
    ema_decay: float = 0.998,
    optim: OptimConfig,
) -> None:
    """Train a model to the end of the schedule, from the task's initial weights if there are any, and leave it with the
    averaged weights, in evaluation mode.

    Arguments as for `TrainingRun` and `LoopConfig`; raises as `load_initial_weights`.
    """
    started_from = load_initial_weights(model, task.initial_weights) if task.initial_weights else ""
    nn.Module.to(model, device)  # diffusers and transformers annotate their own `to` without its self
    config = LoopConfig(task.steps, task.seed, started_from, ema_decay=ema_decay, optim=optim)
    run = TrainingRun(model, config, task.folder, is_excluded)
    run.run(loss_of, on_step=on_step)
    run.copy_ema_to(model)
    model.eval()


@contextmanager
def _recorded_interrupts() -> Iterator[list[int]]:
    """Record Ctrl-C instead of raising KeyboardInterrupt, which could interrupt an update half-way.

    There is one handler for the whole run: swapping handlers around every update has lost a Ctrl-C, twice in whole test
    runs.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python hands signals to the main thread only
        return
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in figures.items()}
