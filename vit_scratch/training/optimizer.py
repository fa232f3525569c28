"""The optimizers, and which parameters go where: Muon for the matrices inside a model, AdamW for all others."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Divide the trainable parameters into those that decay and those that do not.

    Weight matrices decay. Whatever has fewer than two dimensions (biases, norms, LayerScale) does not, nor do the
    parameters that the model's `no_weight_decay()` names (class token, registers, positions).

    Returns:
        Two groups for a torch optimizer, each with the `names` of its parameters; every trainable parameter is in
        exactly one.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    no_weight_decay: Callable[[], set[str]] = getattr(model, "no_weight_decay", set)
    exempt = no_weight_decay()
    decayed = [n for n, p in named.items() if p.dim() >= 2 and n not in exempt]
    rest = [n for n in named if n not in set(decayed)]
    return [
        {"params": [named[n] for n in names], "names": names, "weight_decay": decay}
        for names, decay in ((decayed, weight_decay), (rest, 0.0))
    ]


def adamw(
    model: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float, leave_out: Collection[str] = ()
) -> torch.optim.AdamW:
    """AdamW ("Decoupled Weight Decay Regularization") on `parameter_groups`, but for the names in `leave_out`."""
    groups = parameter_groups(model, weight_decay)
    for group in groups:
        named = zip(group.pop("names"), group["params"], strict=True)  # the optimizer's state holds no names
        group["params"] = [p for name, p in named if name not in leave_out]
    fused = all(p.device.type in ("cpu", "cuda") for g in groups for p in g["params"])
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)


def layer_scales(model: nn.Module, layer_decay: float) -> dict[nn.Parameter, float]:
    """Factors on the learning rate that fall from layer to layer, from the head (1) to the first, for fine-tuning.

    The model's `group_matcher()` says which parameter is of which layer, as timm has it ("BEiT: BERT Pre-Training of
    Image Transformers", appendix).

    Args:
        model: with a `group_matcher()`.
        layer_decay: factor from each layer to the one before it.
    """
    from timm.models import group_parameters

    layers = group_parameters(model, model.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    last = max(layers.values())
    return {p: layer_decay ** (last - layers[name]) for name, p in model.named_parameters()}


def make_optimizers(
    model: nn.Module,
    *,
    muon_lr: float | None,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    layer_decay: float = 1.0,
) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters, or Muon for those that the model's `hidden_matrices()` names and AdamW for the rest.

    Args:
        model: whose trainable parameters are divided among them; each is in exactly one group.
        muon_lr: learning rate of Muon, whose groups have an `lr_ratio` of muon_lr / lr; None for no Muon.
        lr, betas: of AdamW.
        weight_decay: decoupled weight decay of weight matrices, for both.
        layer_decay: as `layer_scales`; where it is not 1, groups are divided by layer and have its factor in their
            `lr_ratio`.
    """
    hidden_matrices: Callable[[], dict[str, int]] = getattr(model, "hidden_matrices", dict)
    stacked = {} if muon_lr is None else hidden_matrices()
    optimizers: list[torch.optim.Optimizer] = [
        adamw(model, lr=lr, betas=betas, weight_decay=weight_decay, leave_out=stacked)
    ]
    if muon_lr is not None:
        named = {n: p for n, p in model.named_parameters() if n in stacked and p.requires_grad}
        groups = [
            {"params": [p for n, p in named.items() if stacked[n] == count], "stacked": count}
            for count in sorted({stacked[n] for n in named})
        ]
        ratio = {"lr_ratio": muon_lr / lr, "weight_decay": weight_decay}
        if groups:
            optimizers.append(Muon([group | ratio for group in groups], lr=muon_lr))
    if layer_decay != 1:
        scales = layer_scales(model, layer_decay)
        for optimizer in optimizers:
            divide_groups(optimizer, scales)
    return optimizers


def divide_groups(optimizer: torch.optim.Optimizer, scales: dict[nn.Parameter, float]) -> None:
    """Divide the groups of an optimizer so that each has parameters of one factor, which goes into its `lr_ratio`."""
    divided = []
    for group in optimizer.param_groups:
        for scale in sorted({scales[p] for p in group["params"]}):
            part = {"params": [p for p in group["params"] if scales[p] == scale]}
            divided.append(group | part | {"lr_ratio": group.get("lr_ratio", 1.0) * scale})
    optimizer.param_groups[:] = divided


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values of matrices close to 1 and keep their singular vectors.

    A Newton-Schulz iteration: with X = U S V^T, a step maps the singular values s to a s + b s^3 + c s^5, whose
    coefficients make small ones grow fast ("Muon: An optimizer for hidden layers in neural networks"). After five
    steps those that were above a hundredth of the norm lie between 0.68 and 1.14.

    Args:
        matrices: (..., rows, columns), not all zero.
        steps: of the iteration.

    Returns:
        The same shape, computed in the type of `matrices`.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.flatten(0, -3) if matrices.dim() > 2 else matrices[None]
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the products below are those of the shorter side
    if 2 * x.shape[-2] <= x.shape[-1] and x.dtype in (torch.float32, torch.float64):
        # The same steps on X X^T alone, where it is much smaller than X: with X' = P X, X' X'^T is P (X X^T) P. It
        # squares the singular values, which takes more digits than half precision has.
        square, product = x @ x.mT, None
        for step in range(steps):
            p = torch.baddbmm(square, square, square, beta=b, alpha=c)
            p.diagonal(dim1=-2, dim2=-1).add_(a)
            product = p if product is None else p @ product
            square = p @ square @ p if step < steps - 1 else square
        x = x if product is None else product @ x
    else:
        for _ in range(steps):
            square = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonalised ("Muon: An optimizer for hidden layers in neural networks").

    For a weight W with gradient G: M = momentum M + (1 - momentum) G; U = momentum M + (1 - momentum) G;
    W = (1 - lr weight_decay) W - lr sqrt(max(1, rows / columns)) orthogonalise(U). The factor makes an update change
    the output of a layer by about lr, whatever the layer's shape ("Deriving Muon").

    Matrices of equal shape are orthogonalised together. On a CPU that is done in float32, which is faster there than
    the bfloat16 of torch.optim.Muon, and in bfloat16 elsewhere.

    Args:
        params: matrices (rows, columns), or groups of them; kernels of convolutions (rows, ...) count as matrices whose
            columns are all their other dimensions. A group's `stacked` says of how many matrices, one above
            the other, each of its parameters consists; they are orthogonalised apart.
        lr: learning rate, the size of an update's singular values.
        momentum: decay of the running average M.
        weight_decay: decoupled weight decay.

    Raises:
        ValueError: a parameter that is no matrix, or is not made of so many.
    """

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, stacked=1))
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() < 2 or p.shape[0] % group["stacked"]:
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} is not {group['stacked']} stacked matrices, "
                        "which Muon takes; give it to AdamW"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parts: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}  # by shape: parts of weights and of their updates
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(average, group["momentum"])
                for part in zip(p.chunk(group["stacked"]), update.chunk(group["stacked"]), strict=True):
                    parts.setdefault(part[1].flatten(1).shape, []).append(part)
            for (rows, columns), pairs in parts.items():
                updates = torch.stack([update.flatten(1) for _, update in pairs])
                updates = orthogonalise(updates if updates.device.type == "cpu" else updates.bfloat16())
                rate = group["lr"] * max(1, rows / columns) ** 0.5
                for (weight, _), update in zip(pairs, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update.view(weight.shape), alpha=-rate)
