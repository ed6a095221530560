"""Text encoders in eager PyTorch: embeddings, layers around this project's attention, and pooling.

config   sizes and rules of an encoder, validated; does not import PyTorch
encoder  TextEncoder, one class for all families
pooling  from the rows of a sequence to one vector
"""
