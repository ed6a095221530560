"""Attention modules in eager PyTorch.

config        sizes and rules, validated
attention     MultiHeadAttention, one class for all variants; projections, rotary and score_bias are its parts
text          a tokenizer and embeddings before attention
presets       named modules
checkpoints   readers of other projects' weights

The exporter turns these modules into artifacts, and the tests compare every served result with them. This
file imports nothing, so that configurations and presets can be read without PyTorch.
"""
