"""Readers of attention weights in other projects' checkpoints.

loading   `load_checkpoint`, the only entry point
layouts   `LAYOUTS`: the names that other projects give to the weights; does not import PyTorch
files     files of named tensors
sizes     from the shapes of weights to a configuration
"""
