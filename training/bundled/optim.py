"""Muon for the weight matrices inside a network, AdamW for everything else, as one optimiser with named state.

Muon: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): momentum, then the update
matrix is replaced by its nearest orthogonal matrix through a Newton-Schulz iteration. The update is scaled to
AdamW's usual size (0.2 sqrt(max(rows, columns)); J. Liu et al., "Muon is scalable for LLM training", 2025, 2.2).
torch.optim.Muon accepts matrices only and updates them one at a time. Here, matrices of one shape are stacked, which on
a CPU makes the update of a network with many small layers several times faster.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...data.errors import RunError
from ...kernels.launch import has_fast_bfloat16

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """Peak learning rates of the two kinds of parameters, and their common settings."""

    muon_lr: float = 3e-3
    adam_lr: float = 1.5e-3
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.01
    clip_norm: float = 1.0


def hidden_matrices(model: nn.Module, excluded: Callable[[str], bool]) -> list[str]:
    """Return the names of the parameters that Muon may train: weights of linear and convolution layers that are not
    `excluded` by name.
    """
    names = []
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            name = f"{module_name}.weight"
            if not excluded(name):
                names.append(name)
    return names


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return the nearest (semi-)orthogonal matrix to each of [n, rows, columns], to the accuracy that Muon needs."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    if has_fast_bfloat16(matrices.device):
        x = x.bfloat16()
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


class MuonAdamW:
    """Updates the parameters of a module in place.

    Args:
        parameters: all trainable parameters by name.
        muon_names: parameters that Muon trains; AdamW trains the others.
        config: learning rates, momentum, weight decay and clipping.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], muon_names: list[str], config: OptimConfig) -> None:
        self.parameters = dict(parameters)
        self.config = config
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name in muon_names:
            weight = self.parameters[name]
            by_shape.setdefault((weight.shape[0], weight[0].numel()), []).append(name)
        self.muon_groups = list(by_shape.items())
        is_muon = set(muon_names)
        self.adam_names = [name for name in self.parameters if name not in is_muon]
        self.momentum = {name: torch.zeros_like(self.parameters[name]) for name in muon_names}
        self.first = {name: torch.zeros_like(self.parameters[name]) for name in self.adam_names}
        self.second = {name: torch.zeros_like(self.parameters[name]) for name in self.adam_names}
        self.num_steps = 0

    @torch.no_grad()
    def step(self, lr_scale: float) -> float:
        """Apply one update at `lr_scale` times the peak rates, clear the gradients, return the gradient's norm.

        Raises RunError, with all parameters as they were, if the norm is not finite.
        """
        config = self.config
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        if not math.isfinite(norm):
            raise RunError(f"the gradient's norm became {norm}; lower the learning rate")
        if norm > config.clip_norm:
            torch._foreach_mul_(gradients, config.clip_norm / norm)
        self.num_steps += 1
        self._muon_step(config.muon_lr * lr_scale)
        self._adam_step(config.adam_lr * lr_scale)
        for parameter in self.parameters.values():
            parameter.grad = None
        return norm

    def _muon_step(self, lr: float) -> None:
        config = self.config
        for (rows, columns), names in self.muon_groups:
            weights: list[Tensor] = [self.parameters[name] for name in names]
            gradients = [w.grad if w.grad is not None else torch.zeros_like(w) for w in weights]
            momenta = [self.momentum[name] for name in names]
            torch._foreach_lerp_(momenta, gradients, 1 - config.momentum)
            looked_ahead = torch._foreach_lerp(gradients, momenta, config.momentum)
            update = orthogonalised(torch.stack([u.reshape(rows, columns) for u in looked_ahead]))
            update.mul_(0.2 * max(rows, columns) ** 0.5)
            torch._foreach_mul_(weights, 1 - lr * config.weight_decay)
            torch._foreach_add_(weights, [u.view_as(w) for u, w in zip(update, weights, strict=True)], alpha=-lr)

    def _adam_step(self, lr: float) -> None:
        config = self.config
        names = [name for name in self.adam_names if self.parameters[name].grad is not None]
        weights: list[Tensor] = [self.parameters[name] for name in names]
        gradients = [w.grad for w in weights if w.grad is not None]
        first, second = [self.first[name] for name in names], [self.second[name] for name in names]
        beta1, beta2 = config.betas
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        denominator = torch._foreach_sqrt(second)
        torch._foreach_div_(denominator, (1 - beta2**self.num_steps) ** 0.5)
        torch._foreach_add_(denominator, 1e-8)
        for weight in weights:
            if weight.ndim > 1:
                weight.mul_(1 - lr * config.weight_decay)
        torch._foreach_addcdiv_(weights, first, denominator, value=-lr / (1 - beta1**self.num_steps))

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all state by name, ready for safetensors."""
        parts = {"momentum": self.momentum, "first": self.first, "second": self.second}
        return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        for name, tensor in self.state_tensors().items():
            tensor.copy_(tensors[name])
        self.num_steps = num_steps
