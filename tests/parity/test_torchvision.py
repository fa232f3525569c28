"""Our VisionTransformer gives the logits and image gradients of torchvision's, with the same weights."""

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer as TorchvisionVisionTransformer

from vit_scratch.transformer.encoder import Encoder
from vit_scratch.vision.vit import VisionTransformer


@torch.no_grad()
def copy_weights(ours, theirs):
    ours.patch_embedding.projection.weight.copy_(theirs.conv_proj.weight.flatten(1))
    ours.patch_embedding.projection.bias.copy_(theirs.conv_proj.bias)
    ours.class_token.copy_(theirs.class_token)
    ours.positions.copy_(theirs.encoder.pos_embedding)
    for mine, other in zip(ours.encoder.layers, theirs.encoder.layers, strict=True):
        mine.norm1.load_state_dict(other.ln_1.state_dict())
        mine.norm2.load_state_dict(other.ln_2.state_dict())
        mine.attention.qkv.weight.copy_(other.self_attention.in_proj_weight)
        mine.attention.qkv.bias.copy_(other.self_attention.in_proj_bias)
        mine.attention.out.load_state_dict(other.self_attention.out_proj.state_dict())
        mine.feed_forward.linear1.load_state_dict(other.mlp[0].state_dict())
        mine.feed_forward.linear2.load_state_dict(other.mlp[3].state_dict())
    ours.encoder.norm.load_state_dict(theirs.encoder.ln.state_dict())
    ours.head.load_state_dict(theirs.heads.head.state_dict())


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("image_size", "patch_size", "dim", "depth", "heads", "hidden"),
    [(16, 4, 24, 3, 3, 60), (16, 16, 32, 1, 1, 32), (32, 4, 16, 2, 4, 64)],
)
def test_logits_and_image_gradients_equal_torchvision(image_size, patch_size, dim, depth, heads, hidden, training):
    torch.manual_seed(0)
    theirs = TorchvisionVisionTransformer(image_size, patch_size, depth, heads, dim, hidden, num_classes=7)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, mean=0.05, std=0.25)
    encoder = Encoder(dim, depth, heads, hidden_dim=hidden)
    ours = VisionTransformer(encoder, image_size=image_size, patch_size=patch_size, num_classes=7)
    copy_weights(ours, theirs)

    images = torch.randn(3, 3, image_size, image_size, dtype=torch.float64)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        results = []
        for model in (ours.train(training).to(dtype), theirs.train(training).to(dtype)):
            leaf = images.to(dtype, copy=True).requires_grad_()
            logits = model(leaf)
            logits.backward(torch.linspace(-1, 1, 21, dtype=dtype).view(3, 7))
            with torch.no_grad():  # where torchvision's attention takes its own fast path in eval mode
                results.append((logits.detach(), leaf.grad, model(leaf)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
            assert a.std() > 1e-6
