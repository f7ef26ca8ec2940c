"""Muon for the weight matrices and AdamW for everything else, written so that the whole state is two dictionaries.

Muon: momentum, then the orthogonalised update (Newton–Schulz, quintic coefficients 3.4445, −4.7750, 2.0315, five
rounds; Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"), experts one by one.
Weights decay by 0.1 times the rate (as in Liu et al. 2025, "Muon is scalable for LLM training"): without it the always
used shared expert outgrows the routed ones, whose products of three matrices fall behind, ten times and more.
AdamW: Loshchilov & Hutter 2019, without weight decay here.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

MUON_DECAY = 0.1
MUON_MOMENTUM, ADAM_BETAS, ADAM_EPS = 0.95, (0.9, 0.95), 1e-8
NOT_MUON = ("embed", "head", "router")


def uses_muon(name: str, parameter: Tensor) -> bool:
    """Matrices (and stacks of them) except embeddings, head and router."""
    return parameter.ndim >= 2 and name.rsplit("_", 1)[-1] not in NOT_MUON


def orthogonalise(g: Tensor, rounds: int = 5) -> Tensor:
    """About U Vᵀ of each matrix of g [N, rows, columns], in BF16 on CUDA and FP32 elsewhere."""
    x = g.to(torch.bfloat16 if g.is_cuda else torch.float32)
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if flip else x


class MuonAdamW:
    """One step over a module's parameters; `momentum` (Muon) and `first`/`second` (Adam) are the state, by name."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters: dict[str, Tensor] = dict(module.named_parameters())
        self.muon = [n for n, p in self.parameters.items() if uses_muon(n, p)]
        self.adam = [n for n, p in self.parameters.items() if not uses_muon(n, p)]
        self.momentum = {n: torch.zeros_like(self.parameters[n]) for n in self.muon}
        self.first = {n: torch.zeros_like(self.parameters[n]) for n in self.adam}
        self.second = {n: torch.zeros_like(self.parameters[n]) for n in self.adam}

    @torch.no_grad()
    def step(self, number: int, muon_rate: float, adam_rate: float) -> None:
        """Apply gradients; `number` counts from 1 (Adam's bias correction). Gradients are cleared."""
        shapes: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in self.muon:
            shapes[tuple(self.parameters[name].shape[-2:])].append(name)
        for shape, names in shapes.items():
            grads = [self.parameters[n].grad for n in names]
            momenta = [self.momentum[n] for n in names]
            torch._foreach_lerp_(momenta, grads, 1 - MUON_MOMENTUM)  # type: ignore[arg-type]
            nesterov = torch._foreach_lerp(grads, momenta, MUON_MOMENTUM)  # type: ignore[arg-type]
            stacked = torch.cat([g.reshape(-1, *shape) for g in nesterov])
            update = orthogonalise(stacked).float() * max(1.0, shape[0] / shape[1]) ** 0.5
            pieces = update.split([g.numel() // (shape[0] * shape[1]) for g in nesterov])
            params = [self.parameters[n] for n in names]
            torch._foreach_mul_(params, 1 - muon_rate * MUON_DECAY)
            torch._foreach_add_(params, [u.view_as(p) for u, p in zip(pieces, params, strict=True)], alpha=-muon_rate)
        b1, b2 = ADAM_BETAS
        params = [self.parameters[n] for n in self.adam]
        grads = [p.grad for p in params]
        first, second = [self.first[n] for n in self.adam], [self.second[n] for n in self.adam]
        torch._foreach_lerp_(first, grads, 1 - b1)  # type: ignore[arg-type]
        torch._foreach_mul_(second, b2)
        torch._foreach_addcmul_(second, grads, grads, 1 - b2)  # type: ignore[arg-type]
        denominator = torch._foreach_div(second, 1 - b2**number)
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, ADAM_EPS)
        torch._foreach_addcdiv_(params, first, denominator, -adam_rate / (1 - b1**number))
        for p in self.parameters.values():
            p.grad = None
