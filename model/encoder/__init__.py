"""Text encoders in eager PyTorch: embeddings, layers around this project's attention, and pooling.

config         sizes and rules of an encoder, validated; does not import PyTorch
encoder        TextEncoder, one class for all families
embeddings     from token ids to rows
relative_bias  a bias of the scores for the distance of two rows
layer          one layer: attention, feed-forward and their normalisation
pooling        from the rows of a sequence to one vector
"""
