"""Replaces one attention layer of a PyTorch encoder by an attention server.

```sh
python examples/replace_a_layer.py save layer.safetensors
python -m export --weights layer.safetensors --layout torch --heads 4 --name my-layer --out model_repository
python -m server --model-repository model_repository
python examples/replace_a_layer.py run 127.0.0.1:8001 my-layer
```
"""

import sys

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
def run(server: str, model: str) -> None:
    """Compares the encoder with one whose first layer asks the server."""
    rows = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    local, remote = build(), build()
    own = remote.layers[0].self_attn
    remote.layers[0].self_attn = RemoteAttention(server, model, batch_first=True, fallback=own)
    difference = (remote(rows) - local(rows)).abs().max().item()
    print(f"largest difference from the local encoder: {difference:.1e}")


if __name__ == "__main__":
    {"save": save, "run": run}[sys.argv[1]](*sys.argv[2:])
