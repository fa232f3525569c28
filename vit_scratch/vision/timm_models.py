"""Our presets in timm's registry: `timm.create_model("vit_scratch_tiny_patch4_32")`, for timm's scripts and tools.

Importing this registers them. `import vit_scratch` sees to that as soon as timm is imported, see `timm_hook`.
"""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._input import update_model_args, update_model_input_size
from torch import Tensor, nn

from vit_scratch.transformer.encoder import Encoder
from vit_scratch.vision.patch_embedding import Size
from vit_scratch.vision.vit import PRESETS, TIMM_POOLINGS, VisionTransformer, check_choice, create_vit, vit_arguments

PREFIX = "vit_scratch_"
ARGUMENTS = {
    "img_size": "image_size",
    "in_chans": "in_channels",
    "drop_path_rate": "drop_path",
    "dynamic_img_size": "any_size",
    "reg_tokens": "registers",
    "init_values": "layer_scale",
    "embed_dim": "dim",
    "num_heads": "heads",
}
"""Our arguments by timm's names."""

CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
"""Mean and standard deviation of each channel, of pixels from 0 to 1."""


class TimmModel(VisionTransformer):
    """A `VisionTransformer` that answers all that timm asks of a model; made by `timm.create_model`.

    Its arguments, weights and logits are those of `VisionTransformer`.
    """

    def __init__(self, encoder: Encoder, **arguments: Any):
        super().__init__(encoder, **arguments)
        height, width = self.patch_embedding.patch_size
        self.feature_info = [
            {"module": f"encoder.layers.{i}", "num_chs": encoder.dim, "reduction": max(height, width)}
            for i in range(encoder.depth)
        ]

    @property
    def global_pool(self) -> str:
        """timm's name of the pooling: "token" or "avg"."""
        return {ours: theirs for theirs, ours in TIMM_POOLINGS.items()}[self.pooling]

    @property
    def in_chans(self) -> int:
        """timm's name of the number of channels."""
        return self.patch_embedding.in_channels

    def set_input_size(self, img_size: Size | None = None, patch_size: Size | None = None) -> None:
        """As `VisionTransformer.set_input_size`; None leaves the size. Raises ValueError for another patch size."""
        if patch_size is not None:
            raise ValueError(f"patch_size={patch_size} can't be changed after a model was built; leave it out")
        if img_size is not None:
            super().set_input_size(img_size)
            update_model_input_size(self, self.patch_embedding.image_size)  # for what timm saves of it

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """As `VisionTransformer.reset_classifier`."""
        super().reset_classifier(num_classes, global_pool)
        update_model_args(self, class_token=self.class_token is not None)  # which stays where the pooling changed

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Outputs of several layers, as timm's models return them.

        Args:
            x: images (B, C, height, width).
            indices: which layers; a number for so many of the last, None for all.
            return_prefix_tokens: return pairs of each output and the tokens in front of its patches.
            norm: apply the final norm to each.
            stop_early: changes nothing; layers that nothing is asked of are not computed in any case.
            output_fmt: "NCHW" for (B, D, rows, columns), or "NLC" for (B, N, D).
            intermediates_only: return only these outputs.

        Returns:
            A list of outputs, or `forward_features` of the images and that list.

        Raises:
            ValueError: another format, or images that the model does not take.
        """
        check_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
        wanted, end = set(feature_take_indices(self.encoder.depth, indices)[0]), self.encoder.depth - 1
        needed = wanted if intermediates_only else wanted | {end}
        found, grid = self.intermediates(x, needed), self.grid_of(x)
        results: list[Any] = []
        for i in sorted(wanted):  # timm's order is that of the layers
            output = self.encoder.norm(found[i]) if norm else found[i]
            prefix, patches = output[:, : self.num_prefix_tokens], output[:, self.num_prefix_tokens :]
            if output_fmt == "NCHW":
                patches = patches.mT.unflatten(2, grid).contiguous()
            results.append((patches, prefix) if return_prefix_tokens and self.num_prefix_tokens else patches)
        return results if intermediates_only else (self.encoder.norm(found[end]), results)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | list[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Any]:
        """DINO's name for `forward_intermediates`: the last `n` layers, or those in a list, as (B, N, D) or as maps."""
        output_fmt = "NCHW" if reshape else "NLC"
        return self.forward_intermediates(
            x, n, return_prefix_tokens, norm, output_fmt=output_fmt, intermediates_only=True
        )

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what the outputs of these layers don't need; returns the layers, counted from 0."""
        wanted, last = feature_take_indices(self.encoder.depth, indices)
        self.encoder.layers = self.encoder.layers[: last + 1]
        self.encoder.depth = last + 1
        self.encoder.arguments["depth"] = self.arguments["depth"] = last + 1
        if prune_norm:
            self.encoder.norm = nn.Identity()
            self.encoder.arguments["final_norm"] = self.arguments["final_norm"] = False
        if prune_head:
            self.pooled_norm = nn.Identity()
            self.arguments["pooled_norm"] = False
            self.reset_classifier(0)
        return wanted


def build(preset: str, **options: Any) -> TimmModel:
    """A preset with changes by timm's names, or by ours.

    Raises:
        ValueError: an unknown name, or a value that our model refuses.
    """
    if options.pop("drop_rate", 0):
        raise ValueError("drop_rate drops elements of the pooled features, which this model can't; use dropout=")
    if "global_pool" in options:
        pool = options.pop("global_pool")
        check_choice("global_pool", pool, tuple(TIMM_POOLINGS))
        options["pooling"] = TIMM_POOLINGS[pool]
    model = create_vit(preset, TimmModel, **{ARGUMENTS.get(name, name): value for name, value in options.items()})
    assert isinstance(model, TimmModel)
    return model


def register(preset: str) -> None:
    """Make a preset known to timm."""
    name = PREFIX + preset

    def entry(pretrained: bool = False, **options: Any) -> nn.Module:
        return build_model_with_cfg(
            lambda **changes: build(preset, **changes),
            name,
            pretrained,
            feature_cfg=dict(out_indices=4, feature_cls="getter"),
            **options,
        )

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"Our preset {preset!r}; options by timm's names or ours."
    entry.__module__ = __name__
    globals()[name] = entry
    register_model(entry)


def default_cfg(preset: str) -> dict[str, Any]:
    """What timm wants to know about the input and the head of a preset."""
    size = vit_arguments(preset)["image_size"]
    mean, std = CIFAR10 if size == 32 else (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    return dict(
        input_size=(3, size, size),
        num_classes=10 if size == 32 else 1000,
        fixed_input_size=True,
        interpolation="bicubic",
        crop_pct=1.0 if size == 32 else 0.9,
        mean=mean,
        std=std,
        first_conv=None,
        classifier="head",
        license="mit",
    )


default_cfgs = generate_default_cfgs({PREFIX + preset: default_cfg(preset) for preset in PRESETS})
for _preset in PRESETS:
    register(_preset)
