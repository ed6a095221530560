"""Attention modules in eager PyTorch.

config        sizes and rules, validated
attention     MultiHeadAttention, one class for all variants; parts: projections, positions
text          a tokenizer and embeddings before attention
presets       named modules
checkpoints   readers of other projects' weights
text_encoder  text encoders and classifiers; text_folders reads them with the libraries of Hugging Face

The exporter turns these modules into artifacts, and the tests compare every served result with them. This
file imports nothing, so that configurations and presets can be read without PyTorch.
"""
