"""Exports the models of the demo: `python -m scripts.export_demo_models --repository model_repository`."""

import argparse
from pathlib import Path

from attention_serving.artifact.manifest import is_whole
from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.model.presets import PRESETS, build_preset

DEMO_MODELS = ("sentence-self-attention", "multi-head-768x12", "cross-attention")


def export_demo_models(description: str) -> Path:
    """Exports the demo models that are absent or damaged into the repository of a program's command line.

    Args:
        description: What the program does, for its help.

    Returns:
        The folder that `--repository` names.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repository", type=Path, required=True, help="folder of the demo's models")
    repository: Path = parser.parse_args().repository
    for name in DEMO_MODELS:
        if not is_whole(repository / name / "1"):
            export_demo_model(name, repository)
    return repository


def export_demo_model(name: str, repository: Path) -> None:
    """Exports one of them."""
    description = PRESETS[name].description
    folder, _ = write_artifact(
        build_preset(name), ModelId(name), repository, description=description, replace=True
    )
    print(f"exported {folder}", flush=True)


if __name__ == "__main__":
    export_demo_models("Exports the models of the demo.")
