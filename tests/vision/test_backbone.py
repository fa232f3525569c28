"""The encoder under other heads: a torchvision detector and a segmentation head on its maps, and tokens of no image."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

from vit_scratch import Encoder, create_vit

SIZE = 64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make_vit(**options):
    return create_vit(dim=48, depth=2, heads=4, patch_size=8, image_size=SIZE, num_classes=0, **options)


class Pyramid(nn.Module):
    """One layer's map at twice, once and half its resolution ("Exploring Plain Vision Transformer Backbones")."""

    def __init__(self, vit, out_channels=32):
        super().__init__()
        self.vit, self.out_channels, width = vit, out_channels, vit.num_features
        up = nn.ConvTranspose2d(width, out_channels, 2, stride=2)
        down = nn.Conv2d(width, out_channels, 2, stride=2)
        self.levels = nn.ModuleList([up, nn.Conv2d(width, out_channels, 1), down])

    def forward(self, images):
        [(feature_map, _)] = self.vit.features(images)
        return {str(i): level(feature_map) for i, level in enumerate(self.levels)}


def scene(height=SIZE, width=SIZE):
    """A red or a blue rectangle on noise, and where it is."""
    image = torch.rand(3, height, width) * 0.3
    w, h = torch.randint(16, 40, (2,)).tolist()
    x, y, kind = (int(torch.randint(0, n, ())) for n in (width - w, height - h, 2))
    image[2 * kind, y : y + h, x : x + w] = 1
    return image, {"boxes": torch.tensor([[x, y, x + w, y + h]]).float(), "labels": torch.tensor([kind + 1])}


@pytest.mark.parametrize(("detector", "updates"), [(RetinaNet, 100), (FasterRCNN, 20)])
def test_a_detector_of_torchvision_trains_on_our_maps(detector, updates):
    anchors = AnchorGenerator(sizes=((16,), (32,), (48,)), aspect_ratios=((0.5, 1.0, 2.0),) * 3)
    options = {"anchor_generator": anchors}
    if detector is FasterRCNN:
        from torchvision.ops import MultiScaleRoIAlign

        pool = MultiScaleRoIAlign(["0", "1", "2"], output_size=4, sampling_ratio=2)
        options = {"rpn_anchor_generator": anchors, "box_roi_pool": pool}
    look = dict(min_size=SIZE, max_size=SIZE, image_mean=[0.5] * 3, image_std=[0.25] * 3)
    model = detector(Pyramid(make_vit(any_size=True)), num_classes=3, **look, **options)
    optimizer, history = torch.optim.AdamW(model.parameters(), 2e-3), []
    images, targets = zip(*[scene() for _ in range(2)], strict=True)
    for _ in range(updates):
        loss = sum(model(list(images), list(targets)).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert all(p.grad.abs().max() > 0 for n, p in model.backbone.vit.named_parameters())
    assert sum(history[-5:]) < 0.7 * sum(history[:5])
    found = model.eval()([scene(48, 64)[0]])[0]  # another shape than in training
    assert found["boxes"].shape[1:] == (4,)


def test_a_segmentation_head_learns_pixels_from_two_layers():
    vit = make_vit(positions="rotary")
    head = nn.Conv2d(2 * vit.num_features, 3, 1)
    optimizer = torch.optim.AdamW([*vit.parameters(), *head.parameters()], 3e-3)

    def segment(images):
        maps = [feature_map for feature_map, _ in vit.features(images, layers=[0, -1])]
        return F.interpolate(head(torch.cat(maps, 1)), size=images.shape[-2:], mode="bilinear")

    def batch():
        images, labels = [], []
        for _ in range(8):
            image, target = scene()
            x0, y0, x1, y1 = target["boxes"][0].long().tolist()
            label = torch.zeros(SIZE, SIZE, dtype=torch.long)
            label[y0:y1, x0:x1] = target["labels"]
            images.append(image)
            labels.append(label)
        return torch.stack(images), torch.stack(labels)

    for _ in range(60):
        images, labels = batch()
        loss = F.cross_entropy(segment(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    images, labels = batch()
    predicted = segment(images).argmax(1)
    assert (predicted == labels).float().mean() > 0.93
    assert (predicted[labels > 0] == labels[labels > 0]).float().mean() > 0.85  # not the background alone


def test_the_encoder_alone_learns_on_tokens_that_are_no_image():
    """Does a set of vectors hold an outlier: no order, no positions, any number of tokens."""
    encoder, head = Encoder(dim=16, depth=1, heads=2), nn.Linear(16, 1)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], 5e-3)

    def batch(tokens):
        x, label = torch.randn(64, tokens, 16), torch.rand(64) < 0.5
        x[label, 0, :4] += 3
        return x[:, torch.randperm(tokens)], label.float()

    for _ in range(150):
        x, label = batch(10)
        loss = F.binary_cross_entropy_with_logits(head(encoder(x).mean(1))[:, 0], label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, label = batch(13)
    assert ((head(encoder(x).mean(1))[:, 0] > 0) == (label > 0)).float().mean() > 0.9
