"""Replaces one attention layer of a PyTorch encoder by an attention server.

    python -m examples.replace_a_layer save layer.safetensors
    python -m export --weights layer.safetensors --layout torch --heads 4 --name my-layer --out models
    python -m server --model-repository models
    python -m examples.replace_a_layer run 127.0.0.1:8001 my-layer

The rest of the encoder stays as it is. If the server cannot be reached, the layer that was replaced computes
instead. docs/remote-attention.md has the details.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from attention_client.torch import RemoteAttention
from safetensors.torch import save_file
from torch import nn

WIDTH, HEADS, LAYERS = 32, 4, 2


def build() -> nn.TransformerEncoder:
    """An encoder that always has the same random weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()


def save(path: str) -> None:
    """Writes the weights of the first layer's attention."""
    save_file(build().layers[0].self_attn.state_dict(), path)


@torch.inference_mode()
def compare(server: str, model: str) -> float:
    """The largest difference between the encoder and one whose first layer asks the server."""
    rows = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    local, remote = build(), build()
    attention = remote.layers[0].self_attn
    remote.layers[0].self_attn = RemoteAttention(server, model, batch_first=True, fallback=attention)
    return float((remote(rows) - local(rows)).abs().max())


def main(arguments: Sequence[str] | None = None) -> int:
    """Saves the layer, or compares the encoders; returns the exit status."""
    parser = argparse.ArgumentParser(description="Replace a layer of an encoder by an attention server.")
    commands = parser.add_subparsers(dest="command", required=True)
    saving = commands.add_parser("save", help="write the weights of the layer")
    saving.add_argument("path", help="the .safetensors file to write")
    running = commands.add_parser("run", help="compare the encoder with one that asks the server")
    running.add_argument("server", help="HOST:PORT")
    running.add_argument("model", help="name of the exported layer")
    options = parser.parse_args(arguments)
    if options.command == "save":
        save(options.path)
    else:
        difference = compare(options.server, options.model)
        print(f"largest difference from the local encoder: {difference:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
