"""Readers of text encoders in folders as Hugging Face and sentence-transformers lay them out.

loading    `load_encoder`, the only entry point
families   the configurations and names of tensors of each family
fields     values of a JSON file, each read once; what is not read is refused
sentence   modules.json and what it names: pooling, linear layers, normalisation, prompts
tokenizer  tokenizer.json and what else is stated about it

Everything that a folder states is honoured or refused by name. Nothing is downloaded, and no code of a folder
is run.
"""
