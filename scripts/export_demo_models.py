"""Exports the models of the demo: `python -m scripts.export_demo_models --repository model_repository`."""

import argparse
from pathlib import Path

from attention_serving.artifact.manifest import is_whole
from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.model.presets import PRESETS, build_preset

DEMO_MODELS = ("sentence-self-attention", "multi-head-768x12", "cross-attention")


def export_demo_models(repository: Path) -> None:
    """Exports the demo models that are absent or damaged."""
    for name in DEMO_MODELS:
        if not is_whole(repository / name / "1"):
            export_demo_model(name, repository)


def export_demo_model(name: str, repository: Path) -> None:
    """Exports one of them."""
    description = PRESETS[name].description
    folder, _ = write_artifact(
        build_preset(name), ModelId(name), repository, description=description, replace=True
    )
    print(f"exported {folder}", flush=True)


def main() -> None:
    """Parses the command line and exports."""
    parser = argparse.ArgumentParser(description="Exports the models of the demo.")
    parser.add_argument("--repository", type=Path, required=True, help="folder to write the artifacts into")
    export_demo_models(parser.parse_args().repository)


if __name__ == "__main__":
    main()
