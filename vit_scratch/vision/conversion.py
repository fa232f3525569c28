"""Vision Transformers of timm, torchvision and transformers as ours, and ours as theirs.

Each conversion takes over every weight, refuses a model that computes something else, saying what, and compares the
logits of both on random images in float64 before it returns.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vit_scratch.vision.matching import counted
from vit_scratch.vision.vit import TIMM_POOLINGS, VisionTransformer, create_vit

TOLERANCE = 1e-4
"""The largest difference between two models' logits that a conversion may leave."""
NOT_ITS_OWN = "the weights are not those of such a model: "


class ConversionError(ValueError):
    """A model that can't be converted; the message says why."""


def refuse(faults: Mapping[str, bool], what: str) -> None:
    """Raise ConversionError with those of the faults that are there."""
    found = [fault for fault, there in faults.items() if there]
    if found:
        raise ConversionError(f"{what} can't be converted: it has {', '.join(found)}")


# What the weights are called


@dataclass(frozen=True)
class Names:
    """Names of weights in another library, by ours; a tuple where one of ours is several of theirs.

    Args:
        model: names, or beginnings of names, outside the layers.
        layers: where layer i is, with {} for i.
        layer: names, or beginnings of names, inside a layer.
    """

    model: dict[str, str]
    layers: str
    layer: dict[str, str | tuple[str, ...]]

    def of(self, name: str) -> list[str]:
        """Their names for a weight of ours."""
        table: Mapping[str, str | tuple[str, ...]] = self.model
        before = ""
        if name.startswith("encoder.layers."):
            _, _, i, name = name.split(".", 3)
            table, before = self.layer, self.layers.format(i) + "."
        for start, theirs in table.items():
            if name == start or name.startswith(start + "."):
                found = (theirs,) if isinstance(theirs, str) else theirs
                return [before + f + name[len(start) :] for f in found]
        raise ConversionError(f"there is no place for the weight {before}{name}")


TIMM = Names(
    {
        "class_token": "cls_token",
        "register_tokens": "reg_token",
        "positions": "pos_embed",
        "patch_embedding.projection": "patch_embed.proj",
        "embedding_norm": "norm_pre",
        "encoder.norm": "norm",
        "pooled_norm": "fc_norm",
        "head": "head",
    },
    "blocks.{}",
    {
        "norm1": "norm1",
        "attention.qkv": "attn.qkv",
        "attention.query_norm": "attn.q_norm",
        "attention.key_norm": "attn.k_norm",
        "attention.out": "attn.proj",
        "branch1.layer_scale.weight": "ls1.gamma",
        "norm2": "norm2",
        "feed_forward.linear1": "mlp.fc1",
        "feed_forward.linear2": "mlp.fc2",
        "branch2.layer_scale.weight": "ls2.gamma",
    },
)
TORCHVISION = Names(
    {
        "class_token": "class_token",
        "positions": "encoder.pos_embedding",
        "patch_embedding.projection": "conv_proj",
        "encoder.norm": "encoder.ln",
        "head": "heads.head",
    },
    "encoder.layers.encoder_layer_{}",
    {
        "norm1": "ln_1",
        "attention.qkv.weight": "self_attention.in_proj_weight",
        "attention.qkv.bias": "self_attention.in_proj_bias",
        "attention.out": "self_attention.out_proj",
        "norm2": "ln_2",
        "feed_forward.linear1": "mlp.0",
        "feed_forward.linear2": "mlp.3",
    },
)
TRANSFORMERS = Names(
    {
        "class_token": "embeddings.cls_token",
        "positions": "embeddings.position_embeddings",
        "patch_embedding.projection": "embeddings.patch_embeddings.projection",
        "encoder.norm": "layernorm",
        "head": "classifier",
    },
    "layers.{}",
    {
        "norm1": "layernorm_before",
        "attention.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attention.out": "attention.o_proj",
        "norm2": "layernorm_after",
        "feed_forward.linear1": "mlp.fc1",
        "feed_forward.linear2": "mlp.fc2",
    },
)


def to_ours(weights: Mapping[str, Tensor], model: VisionTransformer, names: Names) -> None:
    """Give a model of ours, which may be on the meta device, a copy of another library's weights.

    Raises:
        ConversionError: weights that are missing, left over, or of another shape.
    """
    left, found, missing = dict(weights), {}, []
    for name, mine in model.state_dict().items():
        sources = names.of(name)
        parts = [left.pop(source) for source in sources if source in left]
        if len(parts) < len(sources):
            missing.append(sources[0])
            continue
        found[name] = (torch.cat(parts) if len(parts) > 1 else parts[0].clone()).reshape(fitting(name, parts, mine))
    if missing or left:
        raise ConversionError(NOT_ITS_OWN + counted(len(weights), missing=missing, unexpected=list(left)))
    model.load_state_dict(found, assign=True)


def to_theirs(model: VisionTransformer, theirs: nn.Module, names: Names, changed: dict[str, Tensor]) -> None:
    """Give another library's model, which may be on the meta device, a copy of the weights of ours.

    Args:
        model: ours.
        theirs: the other one.
        names: what its weights are called.
        changed: weights of ours that are to be taken instead of the model's own.

    Raises:
        ConversionError: weights that are missing, left over, or of another shape.
    """
    wanted, found = theirs.state_dict(), {}
    for name, mine in (model.state_dict() | changed).items():
        targets = names.of(name)
        for target, part in zip(targets, mine.chunk(len(targets)), strict=True):
            shape = part.shape if target not in wanted else fitting(name, [part], wanted[target])
            found[target] = part.clone().reshape(shape)
    missing, left = [n for n in wanted if n not in found], [n for n in found if n not in wanted]
    if missing or left:
        raise ConversionError(NOT_ITS_OWN + counted(len(wanted), missing=missing, unexpected=left))
    theirs.load_state_dict(found, assign=True)


def fitting(name: str, parts: list[Tensor], target: Tensor) -> torch.Size:
    """The shape of a weight where it goes; only the patch embedding's may differ, a kernel there or a matrix.

    Raises:
        ConversionError: the shapes differ.
    """
    shape = torch.Size([sum(p.shape[0] for p in parts), *parts[0].shape[1:]]) if len(parts) > 1 else parts[0].shape
    kernel = name == "patch_embedding.projection.weight" and shape[:1] == target.shape[:1]
    if shape != target.shape and not (kernel and shape.numel() == target.numel()):
        raise ConversionError(f"the weight {name} has shape {tuple(shape)}, and {tuple(target.shape)} is needed")
    return target.shape


# Are they the same?


@torch.no_grad()
def largest_difference(ours: VisionTransformer, other: nn.Module) -> float:
    """The largest difference between the logits of two models for two random images, computed in float64.

    Args:
        ours: one of ours; it says how large the images are.
        other: any that returns logits, or an object with `logits`.
    """
    embedding = ours.patch_embedding
    device = embedding.projection.weight.device
    generator = torch.Generator().manual_seed(0)
    shape = (2, embedding.in_channels, *embedding.image_size)
    images = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
    results = []
    for model in (ours, other):
        with evaluating(model):
            named = chain(model.named_parameters(), model.named_buffers())  # also buffers that no state dict has
            weights = {n: t.double() if t.is_floating_point() else t for n, t in named}
            output = functional_call(model, weights, (images,))
        output = output if isinstance(output, Tensor) else features_or_logits(output)
        results.append(output)
    return (results[0] - results[1]).abs().max().item()


def features_or_logits(output: Any) -> Tensor:
    """What a model of transformers says of images: logits, or without a classifier the encoded class token."""
    return output.logits if hasattr(output, "logits") else output.last_hidden_state[:, 0]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; every module is in its own mode again afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def check_same(ours: VisionTransformer, theirs: nn.Module) -> None:
    """Raise ConversionError where the `largest_difference` of ours and another model exceeds `TOLERANCE`."""
    difference = largest_difference(ours, theirs)
    if not difference <= TOLERANCE:
        raise ConversionError(
            f"the logits of both models differ by {difference:.2g} on random images, more than {TOLERANCE}: the other "
            "one computes something that was not seen"
        )


def import_weights(theirs: nn.Module, arguments: dict[str, Any], names: Names, start: str = "") -> VisionTransformer:
    """A model of ours with these arguments of `create_vit` and the other one's weights, in its mode, checked."""
    with torch.device("meta"):
        ours = create_vit(**arguments)
    to_ours({n.removeprefix(start): t for n, t in theirs.state_dict().items()}, ours, names)
    check_same(ours, theirs)
    return ours.train(theirs.training)


# timm


def timm_arguments(model: Any) -> dict[str, Any]:
    """The arguments of `create_vit` that describe a Vision Transformer of timm.

    Dropout rates are not taken over. The initial value of LayerScale is not known to the model; it is 1e-5 here.

    Raises:
        ConversionError: a model that computes something that ours doesn't; the message names what.
    """
    from timm.layers import GELU, Attention, GELUTanh, Mlp, PatchEmbed, QuickGELU
    from timm.models.vision_transformer import Block
    from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer

    what = f"timm's {type(model).__name__}"
    if type(model) is not TimmVisionTransformer:
        reason = {
            "VisionTransformerDistilled": "a distillation token with a head of its own",
            "Eva": "the blocks of EVA",
            "VisionTransformerRelPos": "relative positions",
        }.get(type(model).__name__, "a class of its own, which is no plain VisionTransformer")
        refuse({reason: True}, what)
    embedding, block = model.patch_embed, model.blocks[0]
    refuse({f"a {type(embedding).__name__} in front": type(embedding) is not PatchEmbed}, what)
    refuse({f"blocks that are a {type(block).__name__}": type(block) is not Block}, what)
    refuse(
        {
            f"an attention that is a {type(block.attn).__name__}": type(block.attn) is not Attention,
            f"a feed-forward network that is a {type(block.mlp).__name__}": type(block.mlp) is not Mlp,
        },
        what,
    )
    activations = [
        (nn.GELU, "gelu_tanh" if getattr(block.mlp.act, "approximate", None) == "tanh" else "gelu"),
        (GELU, "gelu"),
        (GELUTanh, "gelu_tanh"),
        (QuickGELU, "quick_gelu"),
        (nn.ReLU, "relu"),
    ]
    activation = next((name for cls, name in activations if type(block.mlp.act) is cls), None)
    ends = [m for m in (model.norm, model.fc_norm) if not isinstance(m, nn.Identity)]
    within = [block.norm1, block.norm2, block.attn.q_norm, block.attn.k_norm, model.norm_pre, *ends]
    norms = [m for m in within if not isinstance(m, nn.Identity)]
    pre_norm, class_token = not isinstance(model.norm_pre, nn.Identity), model.cls_token is not None
    refuse(
        {
            "an attention pooling": model.attn_pool is not None,
            f"a pooling {model.global_pool!r}": model.attn_pool is None and model.global_pool not in TIMM_POOLINGS,
            "an average of the prefix tokens, too": model.global_pool == "avg" and model.pool_include_prefix,
            f"an activation {type(block.mlp.act).__name__}": activation is None,
            "a norm inside attention or feed-forward network": any(
                not isinstance(m, nn.Identity) for m in (block.attn.norm, block.mlp.norm, embedding.norm)
            ),
            "norms that are no layer norms": any(not isinstance(m, nn.LayerNorm) for m in norms),
            "norms with different epsilons": len({getattr(m, "eps", None) for m in norms}) > 1,
            "two final norms": len(ends) > 1,
            "no positions": model.pos_embed is None,
            "linear maps without a bias": block.attn.proj.bias is None or block.mlp.fc1.bias is None,
            "a patch embedding with a bias before a norm, or without one": pre_norm != (embedding.proj.bias is None),
            "padding of images": embedding.dynamic_img_pad,
            "a head that is no linear map": not isinstance(model.head, (nn.Linear, nn.Identity)),
        },
        what,
    )
    positions = "class"
    if class_token and model.no_embed_class:
        positions = "none"
    elif model.num_reg_tokens and not model.no_embed_class:
        positions = "all"
    return dict(
        image_size=tuple(embedding.img_size),
        patch_size=tuple(embedding.patch_size),
        in_channels=embedding.proj.in_channels,
        num_classes=model.head.out_features if isinstance(model.head, nn.Linear) else 0,
        dim=model.embed_dim,
        depth=len(model.blocks),
        heads=block.attn.num_heads,
        hidden_dim=block.mlp.fc1.out_features,
        activation=activation,
        layer_scale=None if isinstance(block.ls1, nn.Identity) else 1e-5,
        qk_norm=not isinstance(block.attn.q_norm, nn.Identity),
        qkv_bias=block.attn.qkv.bias is not None,
        norm_eps=block.norm1.eps,
        final_norm=not isinstance(model.norm, nn.Identity),
        pooling=TIMM_POOLINGS[model.global_pool],
        class_token=class_token,
        registers=model.num_reg_tokens,
        prefix_positions=positions,
        embedding_norm=pre_norm,
        pooled_norm=not isinstance(model.fc_norm, nn.Identity),
        any_size=model.dynamic_img_size,
    )


def from_timm(model: nn.Module) -> VisionTransformer:
    """A Vision Transformer of timm as one of ours: the same weights, copied, and the same logits.

    It takes class tokens, registers, average pooling, LayerScale, norms of queries and keys, and the models of CLIP.
    Hand in what `timm.create_model(name, pretrained=True)` returns; a state dict alone does not say how many heads a
    model has.

    Raises:
        ConversionError: a model that computes something that ours doesn't; the message names what.
    """
    return import_weights(model, timm_arguments(model), TIMM)


def timm_options(model: VisionTransformer) -> dict[str, Any]:
    """The arguments of timm's `VisionTransformer` that describe one of ours.

    Raises:
        ConversionError: a model that timm's class can't compute; the message names what it has.
    """
    from timm.layers import GELUTanh, LayerNorm, QuickGELU

    refuse_peculiarities(model, "timm's class")
    a = model.arguments
    hidden = a["hidden_dim"] or 4 * a["dim"]
    activations = {"gelu": nn.GELU, "gelu_tanh": GELUTanh, "quick_gelu": QuickGELU, "relu": nn.ReLU}
    return dict(
        img_size=model.patch_embedding.image_size,
        patch_size=model.patch_embedding.patch_size,
        in_chans=a["in_channels"],
        num_classes=a["num_classes"],
        global_pool={ours: theirs for theirs, ours in TIMM_POOLINGS.items()}[a["pooling"]],
        embed_dim=a["dim"],
        depth=a["depth"],
        num_heads=a["heads"],
        mlp_ratio=(hidden + 0.5) / a["dim"],  # timm rounds the product down
        qkv_bias=a["qkv_bias"],
        qk_norm=a["qk_norm"],
        init_values=a["layer_scale"],
        class_token=model.class_token is not None,
        no_embed_class=a["prefix_positions"] == "none" or (a["prefix_positions"] == "class" and a["registers"] > 0),
        reg_tokens=a["registers"],
        pre_norm=a["embedding_norm"],
        final_norm=a["final_norm"] is not False or a["pooled_norm"],
        fc_norm=a["pooled_norm"],
        dynamic_img_size=a["any_size"],
        norm_layer=partial(LayerNorm, eps=a["norm_eps"]),
        act_layer=activations[a["activation"]],
    )


def to_timm(model: VisionTransformer) -> nn.Module:
    """One of our Vision Transformers as timm's: the same weights, copied, and the same logits.

    Where there are registers and only the class token has a position, which timm does not know, the position is added
    to the class token.

    Raises:
        ConversionError: a model that timm's class can't compute; the message names what it has.
    """
    from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer

    options = timm_options(model)
    with torch.device("meta"):
        theirs = TimmVisionTransformer(**options)
    changed = {}
    if model.prefix_positions == "class" and options["reg_tokens"] and model.class_token is not None:
        assert model.positions is not None
        positions = model.positions.detach()
        changed = {"class_token": model.class_token.detach() + positions[:, :1], "positions": positions[:, 1:]}
    to_theirs(model, theirs, TIMM, changed)
    check_same(model, theirs)
    return theirs.train(model.training)


def refuse_peculiarities(model: VisionTransformer, target: str) -> None:
    """Raise ConversionError for what only our model has."""
    a = model.arguments
    refuse(
        {
            f"{a['positions']} positions": a["positions"] != "learned",
            "a convolutional stem": a["stem"] != "patch",
            "convolutions in its feed-forward networks": a["feed_forward_kernel"] is not None,
            "layers with their norms behind the sums": not a["norm_first"],
        },
        f"for {target}, this model",
    )


# torchvision


def torchvision_arguments(model: Any) -> dict[str, Any]:
    """The arguments of `create_vit` that describe a Vision Transformer of torchvision; dropout rates are left out.

    Raises:
        ConversionError: a model that computes something that ours doesn't; the message names what.
    """
    from torchvision.models import VisionTransformer as TorchvisionVisionTransformer

    what = f"torchvision's {type(model).__name__}"
    refuse({"a class of its own, which is no VisionTransformer": type(model) is not TorchvisionVisionTransformer}, what)
    head = getattr(model.heads, "head", model.heads)
    refuse(
        {
            "a convolutional stem": not isinstance(model.conv_proj, nn.Conv2d),
            "a hidden layer in its head": hasattr(model.heads, "pre_logits"),
            "a head that is no linear map": not isinstance(head, (nn.Linear, nn.Identity)),
        },
        what,
    )
    layer = model.encoder.layers[0]
    return dict(
        image_size=model.image_size,
        patch_size=model.patch_size,
        in_channels=model.conv_proj.in_channels,
        num_classes=head.out_features if isinstance(head, nn.Linear) else 0,
        dim=model.hidden_dim,
        depth=len(model.encoder.layers),
        heads=layer.num_heads,
        hidden_dim=model.mlp_dim,
        norm_eps=layer.ln_1.eps,
    )


def from_torchvision(model: nn.Module) -> VisionTransformer:
    """A Vision Transformer of torchvision, such as `vit_b_16`, as one of ours: the same weights and the same logits.

    Raises:
        ConversionError: a model that computes something that ours doesn't; the message names what.
    """
    return import_weights(model, torchvision_arguments(model), TORCHVISION)


def refuse_all_but_the_first_vit(model: VisionTransformer, target: str) -> None:
    """Raise ConversionError for what the Vision Transformer of the first paper has not."""
    refuse_peculiarities(model, target)
    a = model.arguments
    refuse(
        {
            "a mean of the patches": a["pooling"] != "class",
            "registers": a["registers"] > 0,
            "a class token without a position": a["prefix_positions"] == "none",
            "a norm before its encoder": a["embedding_norm"],
            "no norm behind its encoder": a["final_norm"] is False,
            "LayerScale": a["layer_scale"] is not None,
            "norms of queries and keys": a["qk_norm"],
        },
        f"for {target}, this model",
    )


def to_torchvision(model: VisionTransformer) -> nn.Module:
    """One of our Vision Transformers as torchvision's: the same weights and the same logits.

    Raises:
        ConversionError: a model that torchvision's class can't compute; the message names what it has.
    """
    from torchvision.models import VisionTransformer as TorchvisionVisionTransformer

    refuse_all_but_the_first_vit(model, "torchvision's class")
    a = model.arguments
    (height, width), (rows, columns) = model.patch_embedding.image_size, model.patch_embedding.patch_size
    refuse(
        {
            f"an activation {a['activation']!r}": a["activation"] != "gelu",
            "queries, keys and values without a bias": not a["qkv_bias"],
            f"images of {height} x {width} in patches of {rows} x {columns}": height != width or rows != columns,
            f"{a['in_channels']} channels": a["in_channels"] != 3,
            "no head": not a["num_classes"],
        },
        "for torchvision's class, this model",
    )
    with torch.device("meta"):
        theirs = TorchvisionVisionTransformer(
            image_size=height,
            patch_size=rows,
            num_layers=a["depth"],
            num_heads=a["heads"],
            hidden_dim=a["dim"],
            mlp_dim=a["hidden_dim"] or 4 * a["dim"],
            num_classes=a["num_classes"],
            norm_layer=partial(nn.LayerNorm, eps=a["norm_eps"]),
        )
    to_theirs(model, theirs, TORCHVISION, {})
    check_same(model, theirs)
    return theirs.train(model.training)


# transformers

TRANSFORMERS_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
"""Ours by the names in configurations of transformers."""


def transformers_arguments(model: Any) -> dict[str, Any]:
    """The arguments of `create_vit` that describe a `ViTForImageClassification` or `ViTModel`; dropout is left out.

    Raises:
        ConversionError: a model that computes something that ours doesn't; the message names what.
    """
    from transformers import ViTForImageClassification, ViTModel

    what = f"transformers' {type(model).__name__}"
    refuse(
        {
            "a class of its own, which is neither ViTForImageClassification nor ViTModel": type(model)
            not in (ViTForImageClassification, ViTModel)
        },
        what,
    )
    config = model.config
    refuse(
        {
            "a pooler (add_pooling_layer=False leaves it out)": getattr(model, "pooler", None) is not None,
            "a mask token": getattr(model, "vit", model).embeddings.mask_token is not None,
            f"an activation {config.hidden_act!r}": config.hidden_act not in TRANSFORMERS_ACTIVATIONS,
        },
        what,
    )
    head = getattr(model, "classifier", None)
    return dict(
        image_size=config.image_size,
        patch_size=config.patch_size,
        in_channels=config.num_channels,
        num_classes=head.out_features if isinstance(head, nn.Linear) else 0,
        dim=config.hidden_size,
        depth=config.num_hidden_layers,
        heads=config.num_attention_heads,
        hidden_dim=config.intermediate_size,
        activation=TRANSFORMERS_ACTIVATIONS[config.hidden_act],
        qkv_bias=config.qkv_bias,
        norm_eps=config.layer_norm_eps,
    )


def from_transformers(model: nn.Module) -> VisionTransformer:
    """A `ViTForImageClassification`, or a `ViTModel` without a pooler, as one of ours: the same weights and logits.

    Raises:
        ConversionError: a model that computes something that ours doesn't; the message names what.
    """
    return import_weights(model, transformers_arguments(model), TRANSFORMERS, start="vit.")


def to_transformers(model: VisionTransformer) -> nn.Module:
    """One of our Vision Transformers as a `ViTForImageClassification`, or without a head as a `ViTModel`.

    Raises:
        ConversionError: a model that these can't compute; the message names what it has.
    """
    from transformers import ViTConfig, ViTForImageClassification, ViTModel

    refuse_all_but_the_first_vit(model, "transformers' classes")
    a = model.arguments
    config = ViTConfig(
        hidden_size=a["dim"],
        num_hidden_layers=a["depth"],
        num_attention_heads=a["heads"],
        intermediate_size=a["hidden_dim"] or 4 * a["dim"],
        hidden_act={ours: theirs for theirs, ours in TRANSFORMERS_ACTIVATIONS.items()}[a["activation"]],
        layer_norm_eps=a["norm_eps"],
        image_size=one_if_equal(model.patch_embedding.image_size),
        patch_size=one_if_equal(model.patch_embedding.patch_size),
        num_channels=a["in_channels"],
        qkv_bias=a["qkv_bias"],
    )
    config.num_labels = a["num_classes"] or 2
    build: Callable[[], nn.Module] = partial(ViTModel, config, add_pooling_layer=False)
    names = TRANSFORMERS
    if model.num_classes:
        build = partial(ViTForImageClassification, config)
        names = Names(
            {ours: name if ours == "head" else f"vit.{name}" for ours, name in TRANSFORMERS.model.items()},
            f"vit.{TRANSFORMERS.layers}",
            TRANSFORMERS.layer,
        )
    with torch.device("meta"):
        theirs = build()
    to_theirs(model, theirs, names, {})
    check_same(model, theirs)
    return theirs.train(model.training)


def one_if_equal(pair: tuple[int, int]) -> int | tuple[int, int]:
    """A number for two that are equal."""
    return pair[0] if pair[0] == pair[1] else pair
