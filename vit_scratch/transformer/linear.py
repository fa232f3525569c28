"""Linear maps, with the fastest matrix products that PyTorch has for the device.

On a CPU, PyTorch's `linear` takes the products of MKL. Those of oneDNN, which PyTorch brings too, are in the same
float32 arithmetic. For the shapes of a small Transformer they take about two thirds of the time where the processor has
AVX-512, and 1.1 times as long where it has not (LOG.md).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula


def onednn_is_faster() -> bool:
    """Whether PyTorch brings oneDNN and runs on a processor where its products are the faster ones."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


ONEDNN = onednn_is_faster()

if torch.backends.mkldnn.is_available():

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _operations(x: torch.Size, weight: torch.Size, *args, **kwargs) -> int:
        """For torch's counter, which does not know this product: a multiply-add is two operations."""
        return 2 * math.prod(x) * weight[0]


class _OneDNNLinear(torch.autograd.Function):
    """`linear` by oneDNN, and the gradient of its input, too; that of the weight is faster as MKL's product."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in), (out, in), (out,) -> (..., out)."""
        ctx.save_for_backward(x, weight)
        return onednn(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(..., out) -> gradients of input, weight and bias, where they are needed."""
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        product = linear if torch.is_grad_enabled() else onednn  # where the gradient is to be differentiated, too
        rows = gradient.flatten(0, -2)
        return (
            product(gradient, weight.t()) if of_x else None,
            rows.t().mm(x.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """oneDNN's product, which PyTorch can't differentiate."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `torch.nn.functional.linear` computes: (..., in), (out, in), (out,) -> (..., out)."""
    if (
        not ONEDNN
        or x.device.type != "cpu"
        or x.dtype != torch.float32
        or weight.dtype != torch.float32
        or x.dim() < 2
        or not x.numel()
        or not weight.numel()
        or weight.dim() != 2
        or x.shape[-1] != weight.shape[1]  # PyTorch says what is wrong
        # oneDNN would read a bias as if it were contiguous, and knows no broadcasting.
        or not (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()))
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()  # vmap, jvp and the like
        or torch.autograd.forward_ad._current_level >= 0
    ):
        return F.linear(x, weight, bias)
    return _OneDNNLinear.apply(x, weight, bias)


class Linear(nn.Linear):
    """A linear map (..., in) -> (..., out), computed by `linear`.

    Args:
        in_features, out_features, bias, device, dtype: as `nn.Linear`.
        stacked: of how many maps of the same input it consists, one above the other in the weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        stacked: int = 1,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.stacked = stacked

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return linear(x, self.weight, self.bias)


def matrices(model: nn.Module) -> dict[str, int]:
    """Names of the weights of all linear maps in a model, and of how many stacked maps each consists.

    Convolutions count among them; those that take each channel by itself mix none, and don't.
    """
    return {
        f"{name}.weight".lstrip("."): getattr(m, "stacked", 1)
        for name, m in model.named_modules()
        if isinstance(m, Linear) or (isinstance(m, nn.Conv2d) and m.groups == 1)
    }
