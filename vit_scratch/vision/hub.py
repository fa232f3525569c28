"""Models in folders and on the Hugging Face hub: weights, configuration, classes, preprocessing and a model card.

The weights that come with this package are such folders, too; `PACKAGED` has their names.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import ModelCard, ModelCardData, PyTorchModelHubMixin, hf_hub_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from vit_scratch.files import let_others_read
from vit_scratch.vision.matching import weight_differences
from vit_scratch.vision.patch_embedding import as_pair

WEIGHTS = Path(__file__).parents[1] / "weights"
PACKAGED = sorted(path.name for path in WEIGHTS.glob("*") if (path / "config.json").is_file())
"""Names of the weights that come with this package."""
T = TypeVar("T", bound="Hub")


class Hub(PyTorchModelHubMixin, library_name="vit_scratch", tags=["image-classification", "vision-transformer"]):
    """Gives a model `save_pretrained`, `from_pretrained` and `push_to_hub`.

    Attributes:
        arguments: what the model is built with; `from_arguments` builds it.
        metadata: what is to be known about its use, as plain values: `classes`, a list of names; `preprocessing`, with
            mode, image_size, interpolation, mean and std; `results`, a list of sentences; `temperature`, which divides
            the logits for calibrated probabilities. Saved and loaded with it.
        saved_as: the folder's name, for the model card.
    """

    arguments: dict[str, Any]
    metadata: dict[str, Any]
    saved_as: str = "FOLDER"

    @classmethod
    def from_arguments(cls: type[T], arguments: dict[str, Any]) -> T:
        """A model with first weights."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls: type[T], pretrained_model_name_or_path: str | Path, **options: Any) -> T:
        """A saved model, in evaluation mode, in float32.

        Args:
            pretrained_model_name_or_path: a name in `PACKAGED`, a folder that `save_pretrained` wrote, or a model on
                the hub; neither of the first two needs a network.
            options: of `PyTorchModelHubMixin.from_pretrained`, such as revision or token.

        Raises:
            ValueError: no such model, or files that are damaged or don't belong together.
        """
        name = str(pretrained_model_name_or_path)
        folder = WEIGHTS / name if name in PACKAGED else Path(name)
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise ValueError(f"{folder} holds no config.json, so save_pretrained did not write it")
        try:
            return super().from_pretrained(str(folder) if folder.is_dir() else name, **options)
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
            first = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"{name} is no folder that can be read, none of the weights in this package ({', '.join(PACKAGED)}), "
                f"and could not be fetched: {type(error).__name__}: {first}"
            ) from error

    @classmethod
    def _from_pretrained(  # type: ignore[override]
        cls: type[T], *, model_id: str, config: dict[str, Any] | None, **options: Any
    ) -> T:
        """What `from_pretrained` does once the configuration is there."""
        if config is None or not isinstance(config.get("arguments"), dict):
            raise ValueError(f"{model_id} has no config.json of this package: it does not say how to build the model")
        path = Path(model_id) / "model.safetensors"
        if not Path(model_id).is_dir():
            known = ("revision", "cache_dir", "force_download", "token", "local_files_only")
            fetched = hf_hub_download(model_id, "model.safetensors", **{n: options[n] for n in known if n in options})
            path = Path(fetched)
        if not path.is_file():
            raise ValueError(f"{path} does not exist")
        model = cls.from_arguments(config["arguments"])
        assert isinstance(model, nn.Module)
        try:
            weights = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if fault := weight_differences(weights, model.state_dict()):
            raise ValueError(f"{path} holds other weights than those of the model in config.json: {fault}")
        model.load_state_dict(weights)
        model.metadata = {name: value for name, value in config.items() if name != "arguments"}
        return model.eval()

    def _save_pretrained(self, save_directory: Path) -> None:
        """Weights and configuration; the card is written by the caller."""
        super()._save_pretrained(save_directory)
        let_others_read(save_directory / "model.safetensors")
        self.saved_as = save_directory.name
        text = json.dumps({"arguments": self.arguments} | self.metadata, indent=1, ensure_ascii=False)
        (save_directory / "config.json").write_text(text + "\n", encoding="utf-8")

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The model card: how to use the model, what it takes and gives, and what was measured."""
        data = ModelCardData(license="mit", library_name="vit_scratch", pipeline_tag="image-classification")
        classes, look = self.metadata.get("classes", []), self.metadata.get("preprocessing", {})
        a, results = self.arguments, self.metadata.get("results", [])
        size, patch = (" x ".join(map(str, as_pair(n, a[n]))) for n in ("image_size", "patch_size"))
        parameters = sum(p.numel() for p in self.parameters()) if isinstance(self, nn.Module) else 0
        lines = [
            "# A Vision Transformer of vit_scratch",
            "",
            f"{parameters:,} parameters, {a['dim']} wide, {a['depth']} deep, {a['heads']} heads; "
            f"images of {size} pixels, {a['in_channels']} channels, in patches of {patch}.",
            "",
            "```python",
            "from vit_scratch import VisionTransformer",
            "",
            f'model = VisionTransformer.from_pretrained("{self.saved_as}")',
            "```",
            "",
            "## Preprocessing",
            "",
            *([f"{name}: {value}  " for name, value in look.items()] or ["Not known."]),
            "",
            "## Results",
            "",
            *([f"- {line}" for line in results] or ["Not measured."]),
            "",
            "## Classes",
            "",
            ", ".join(classes) or "None: the output is features.",
        ]
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines) + "\n")
