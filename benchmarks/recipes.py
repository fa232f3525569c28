"""Accuracy for the same training compute: our recipes and those of others, on the same images, split and seeds.

    pip install vit-pytorch
    python benchmarks/recipes.py --budget 0.03 --seeds 0 1 2 --data.kind imagefolder --data.root data/cifar10-jpeg \\
        --out runs/recipes

Ours are the configurations named like the budget, trained as train.py does. A peer is trained with the model of its own
package and the optimizer, learning rate, weight decay and augmentation that it published, its schedule compressed to
the budget; all go through the same loop. The test set is read once for each training, after its last update.

Every training leaves a file RECIPE_BUDGET_SEED.json, and is not done again where that is there; one that was
interrupted goes on from its last state. So the command can be repeated, and several with other --recipes or --seeds can
run side by side; each ends with the table of all that is in the folder.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).parent.parent))

from vit_scratch.config import read_config
from vit_scratch.data.augmentation import BatchTransform
from vit_scratch.data.loaders import Loader, channel_statistics, make_loader, open_images
from vit_scratch.data.sources import load
from vit_scratch.evaluation.classification import evaluate_classifier
from vit_scratch.tasks.classification import resolve, smoothed_cross_entropy, train
from vit_scratch.training.checkpoint import TrainingStates
from vit_scratch.training.compute import PETA, ComputeCounter
from vit_scratch.training.device import device_name, pick_device
from vit_scratch.training.log import RunLog
from vit_scratch.training.loop import fit
from vit_scratch.training.provenance import versions
from vit_scratch.training.schedule import warmup_cosine

CONFIGS = Path(__file__).parent.parent / "configs"
READINGS = 20
"""How often a peer's held-out accuracy is read on the way."""


@dataclass
class Peer:
    """Somebody else's recipe.

    Attributes:
        build: makes the model.
        optimizer: makes the optimizer from the parameters and a learning rate.
        lr, min_lr: highest and last learning rate of the cosine.
        warmup: share of the updates in which the rate rises.
        batch: what happens to whole batches, as `BatchTransform`.
        sample: what happens to each image before that.
        mix_probability: share of the batches that MixUp or CutMix are applied to.
    """

    build: Callable[[], nn.Module]
    optimizer: Callable[[Iterator[nn.Parameter], float], torch.optim.Optimizer]
    lr: float
    min_lr: float
    warmup: float
    batch: dict[str, Any] = field(default_factory=dict)
    sample: Callable[[Tensor], Tensor] | None = None
    mix_probability: float = 1.0


def adamw(weight_decay: float) -> Callable[[Iterator[nn.Parameter], float], torch.optim.Optimizer]:
    """AdamW with that decay."""
    return lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)


def timm_vit(dim: int, depth: int, heads: int, mlp_ratio: float = 4.0) -> nn.Module:
    """timm's plain ViT for patches of 4 pixels."""
    import timm

    return timm.models.VisionTransformer(
        img_size=32,
        patch_size=4,
        embed_dim=dim,
        depth=depth,
        num_heads=heads,
        mlp_ratio=mlp_ratio,
        num_classes=10,
    )


def small_data_vit(dim: int, depth: int, heads: int) -> nn.Module:
    """vit-pytorch's ViT with shifted patches and locality attention; hidden width 2 * dim, as its paper has it."""
    from vit_pytorch.vit_for_small_dataset import ViT

    return ViT(
        image_size=32,
        patch_size=4,
        num_classes=10,
        dim=dim,
        depth=depth,
        heads=heads,
        dim_head=dim // heads,
        mlp_dim=2 * dim,
    )


def cct(name: str, convolutions: int) -> nn.Module:
    """vit-pytorch's compact convolutional transformer, with kernels of 3."""
    from vit_pytorch import cct as models

    return getattr(models, name)(
        img_size=32,
        n_conv_layers=convolutions,
        kernel_size=3,
        stride=1,
        padding=1,
        num_classes=10,
        positional_embedding="learnable",
    )


def timm_policy(name: str, size: int) -> Callable[[Tensor], Tensor]:
    """timm's RandAugment for bytes (C, height, width)."""
    from timm.data.auto_augment import rand_augment_transform

    policy = rand_augment_transform(name, {"translate_const": int(size * 0.45), "img_mean": (125, 123, 114)})

    def transform(image: Tensor) -> Tensor:
        seed = int(torch.randint(2**31, ()))  # timm draws from Python's and numpy's generators
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        return v2.functional.pil_to_tensor(policy(v2.functional.to_pil_image(image)))

    return transform


CROP = dict(shift=4, padding="zero", flip=True)
AUTO_AUGMENT = v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)
SMALL_DATA: dict[str, Any] = dict(  # github.com/aanna0701/SPT_LSA_ViT: main.py, without repeated augmentation
    optimizer=adamw(0.05),
    lr=1e-3,
    min_lr=5e-6,
    warmup=0.1,
    batch=CROP | dict(erase=0.25, mixup=1.0, cutmix=1.0),
    sample=AUTO_AUGMENT,
    mix_probability=0.5,
)
COMPACT: dict[str, Any] = (
    dict(  # github.com/SHI-Labs/Compact-Transformers: configs/pretrained/cct_7-3x1_cifar10_300epochs.yml
        optimizer=adamw(0.06),
        lr=5.5e-4,
        min_lr=1e-5,
        warmup=10 / 300,
        batch=dict(flip=True, mixup=0.8, cutmix=1.0),
        sample=v2.Compose(
            [
                v2.RandomResizedCrop(32, scale=(0.8, 1.0), interpolation=v2.InterpolationMode.BICUBIC),
                timm_policy("rand-m9-mstd0.5-mmax9-inc1", 32),
            ]
        ),
    )
)
PEERS = {
    # The learning rate is the best of 1e-3, 2e-3 and 4e-3 on the held-out images at 0.01 PFLOP (LOG.md).
    "timm_64x4": Peer(partial(timm_vit, 64, 4, 4), adamw(0.05), 2e-3, 1e-5, 0.05, CROP),
    "timm_96x4": Peer(partial(timm_vit, 96, 4, 3), adamw(0.05), 2e-3, 1e-5, 0.05, CROP),
    "spt_lsa_192x9": Peer(partial(small_data_vit, 192, 9, 12), **SMALL_DATA),
    "spt_lsa_64x4": Peer(partial(small_data_vit, 64, 4, 4), **SMALL_DATA),
    "cct_2_3x2": Peer(partial(cct, "cct_2", 2), **COMPACT),
    "cct_7_3x1": Peer(partial(cct, "cct_7", 1), **COMPACT),
    "omihub777": Peer(  # github.com/omihub777/ViT-CIFAR: README.md, Hyperparams
        partial(timm_vit, 384, 7, 12, 1.0),
        lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, weight_decay=5e-5),
        1e-3,
        1e-5,
        5 / 200,
        CROP,
        AUTO_AUGMENT,
    ),
}


class Slices:
    """A loader whose epochs are cut into equal parts, so that the loop looks at the held-out images more often.

    Args:
        loader: whose batches it gives, in the same order.
        length: batches of a part, but for the last of an epoch.
    """

    def __init__(self, loader: Loader, length: int):
        self.loader, self.length = loader, length
        self.parts = math.ceil(len(loader) / length)

    def __len__(self) -> int:
        return self.length

    def needed(self, updates: int) -> int:
        """How many parts have so many batches, as the last part of each epoch is shorter."""
        whole, rest = divmod(updates, len(self.loader))
        return whole * self.parts + math.ceil(rest / self.length)

    def shapes(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Those of a whole epoch."""
        return self.loader.shapes()

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Part number `epoch`, counted over all epochs, from its batch number `start` on."""
        whole, part = divmod(epoch, self.parts)
        return islice(self.loader.batches(whole, part * self.length + start), self.length - start)


@dataclass
class Images:
    """The images of a configuration: bytes in memory, on the device."""

    parts: dict[str, Any]
    mean: list[float]
    std: list[float]
    form: Any

    @classmethod
    def open(cls, config: Any) -> "Images":
        """Read them as `vit_scratch.tasks.classification` does."""
        config, form, _ = resolve(config)
        dataset = load(config.data.kind, config.data.root, image_size=form.image_size)
        dataset.hold_out(config.data.hold_out, config.data.split_seed)
        parts = {
            name: open_images(getattr(dataset, name), form, in_memory=True, skip_broken=False)[0]
            for name in ("train", "val", "test")
        }
        images = parts["train"].images
        assert isinstance(images, Tensor)  # held in memory
        mean, std = channel_statistics(images)
        return cls(parts, mean, std, form)

    def loader(self, part: str, batch_size: int, transform: Any, **options: Any) -> Loader:
        """Batches of a part; options as `make_loader`."""
        return make_loader(self.parts[part], self.form, batch_size, transform, **options)


def train_peer(peer: Peer, images: Images, budget: float, seed: int, out: Path, device: torch.device) -> dict[str, Any]:
    """Train a peer's recipe and evaluate it; returns what `main` writes."""
    torch.manual_seed(seed)
    model = peer.build().to(device)
    plain = BatchTransform(images.mean, images.std)
    light = {name: value for name, value in peer.batch.items() if name not in ("mixup", "cutmix")}
    mixed = BatchTransform(images.mean, images.std, num_classes=10, **peer.batch)
    unmixed = BatchTransform(images.mean, images.std, **light)

    def transform(x: Tensor, y: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        return (mixed if draw % 1000 < 1000 * peer.mix_probability else unmixed)(x, y, draw)

    loader = images.loader("train", 128, transform, sample_transform=peer.sample, seed=seed, device=device)
    loss = partial(smoothed_cross_entropy, 0.1)
    operations = ComputeCounter(model, loss)
    updates = max(round(budget * PETA / operations.mean(loader.shapes())), 2)
    slices = Slices(loader, max(updates // READINGS, 1))
    held_out = images.loader("val", 256, plain, device=device)

    def validate(network: nn.Module) -> dict[str, float]:
        result = evaluate_classifier(network, held_out.batches(), 10, held_out.count)
        return {"loss": result.loss, "accuracy": result.accuracy}

    states = TrainingStates(out / "states")
    state, _ = states.load()
    done = state["progress"]["update"] if state else 0
    log = RunLog(out, epochs=slices.needed(updates), updates=updates, items="images", start=done)
    schedule = partial(
        warmup_cosine, updates=updates, warmup=max(round(peer.warmup * updates), 1), peak=peer.lr, final=peer.min_lr
    )
    stopped = fit(
        model,
        slices,
        loss,
        validate,
        [peer.optimizer(model.parameters(), peer.lr)],
        schedule,
        updates=updates,
        accumulate=1,
        clip_norm=0.0,
        precision=torch.float32,
        device=device,
        ema=None,
        operations=operations,
        adapt=None,
        log=log,
        states=states,
        state=state,
        save_weights=lambda name, network, row: None,
        checkpoint_every=None,
        log_every=10,
    )
    log.close()
    if stopped is not None:
        sys.exit(128 + stopped)
    test = images.loader("test", 256, plain, device=device)
    result = evaluate_classifier(model, test.batches(), 10, test.count)
    return {
        "val_accuracy": log.rows[-1]["val_accuracy"],
        "test_accuracy": result.accuracy,
        "pflop": log.rows[-1]["pflop"],
        "images": updates * 128,
        "seconds": sum(row["seconds"] for row in log.rows),
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": [[row["pflop"], row["val_accuracy"]] for row in log.rows],
    }


def train_ours(config: Any, out: Path) -> dict[str, Any]:
    """Train a configuration as train.py does; returns what `main` writes."""
    stopped = train(config, out, resume=True)
    if stopped is not None:
        sys.exit(128 + stopped)
    summary = json.loads((out / "summary.json").read_text())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "val_accuracy": rows[-1]["val_accuracy"],
        "test_accuracy": summary["test"]["accuracy"],
        "pflop": summary["pflop"],
        "images": rows[-1]["update"] * config.train.batch_size,
        "seconds": summary["training_seconds"],
        "parameters": summary["parameters"],
        "curve": [[row["pflop"], row["val_accuracy"]] for row in rows],
    }


def table(folder: Path) -> str:
    """All results in a folder: mean and spread over seeds, and the compute to the best peer's accuracy."""
    results: dict[float, dict[str, list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        results.setdefault(result["budget"], {}).setdefault(result["recipe"], []).append(result)

    def spread(values: list[float]) -> str:
        deviation = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
        return f"{100 * statistics.mean(values):.2f}{deviation}"

    lines = []
    for budget, recipes in sorted(results.items()):
        finals = {name: statistics.mean(r["val_accuracy"] for r in runs) for name, runs in recipes.items()}
        peers = [name for name in recipes if name in PEERS]
        goal = max((finals[name] for name in peers), default=math.inf)
        lines += [
            f"{budget} PFLOP",
            "",
            "| recipe | parameters | images seen | held out, % | test, % | PFLOP | PFLOP to "
            + (f"{100 * goal:.1f} % held out" if peers else "the best peer")
            + " | seconds | seeds |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for name in sorted(recipes, key=lambda n: -finals[n]):
            runs = recipes[name]
            readings = zip(*(r["curve"] for r in runs), strict=True)  # of all seeds at the same compute
            curve = [[statistics.mean(values) for values in zip(*reading, strict=True)] for reading in readings]
            first = next((f"{compute:.4f}" for compute, accuracy in curve if accuracy >= goal), "not reached")
            lines.append(
                f"| {name} | {runs[0]['parameters']:,} | {runs[0]['images']:,} "
                f"| {spread([r['val_accuracy'] for r in runs])} | {spread([r['test_accuracy'] for r in runs])} "
                f"| {statistics.mean(r['pflop'] for r in runs):.4f} | {first} "
                f"| {statistics.mean(r['seconds'] for r in runs):.0f} | {', '.join(str(r['seed']) for r in runs)} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, required=True, help="training compute in PFLOP")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--recipes", nargs="+", help="all of ours for the budget and all peers without")
    parser.add_argument("--lr", type=float, help="another learning rate for the peers, which are then named with it")
    parser.add_argument("--data.kind", dest="kind", default="cifar10")
    parser.add_argument("--data.root", dest="root", default="data")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    values = parser.parse_args()

    configs = {p.stem: p for p in sorted(CONFIGS.glob(f"cifar10_{values.budget:g}pf*.yaml"))}
    recipes = values.recipes or [*configs, *PEERS]
    if unknown := [name for name in recipes if name not in configs and name not in PEERS]:
        parser.error(f"no recipe {unknown[0]!r} for this budget; there are {', '.join([*configs, *PEERS])}")
    device = pick_device(values.device)
    data = ["--data.kind", values.kind, "--data.root", values.root, "--device", values.device]
    images = None
    values.out.mkdir(parents=True, exist_ok=True)
    for seed in values.seeds:
        for recipe in recipes:
            label = recipe if values.lr is None or recipe not in PEERS else f"{recipe}_lr{values.lr:g}"
            name = f"{label}_{values.budget:g}_{seed}"
            path = values.out / f"{name}.json"
            if path.exists():
                continue
            print(f"--- {name}", flush=True)
            if recipe in PEERS:
                if images is None:
                    config = ["--data.kind", values.kind, "--data.root", values.root]
                    images = Images.open(read_config(CONFIGS / "cifar10_0.03pf.yaml", config))
                peer = PEERS[recipe]
                peer.lr = values.lr or peer.lr
                result = train_peer(peer, images, values.budget, seed, values.out / name, device)
            else:
                result = train_ours(read_config(configs[recipe], [*data, "--seed", str(seed)]), values.out / name)
            about = {"recipe": label, "budget": values.budget, "seed": seed, "device": device_name(device)}
            path.write_text(json.dumps(about | result | {"versions": versions()}, indent=1) + "\n")
    print(table(values.out))


if __name__ == "__main__":
    main()
