"""Who may do what: credentials become identities, and identities have rights. Knows neither gRPC nor models.

rights.py         what an identity may do, and the right that a method needs
identities.py     who calls: name, rights, limits and expiry
entries.py        one identity of the tokens file; token_file.py: the whole file, read, checked and written
watched_file.py   reloads a file when it changes; a bad one keeps what was read before
key_set.py        the public keys that sign JSON Web Tokens; key_sources.py: from a file or a URL
web_tokens.py     verifies JSON Web Tokens, each once
guard.py          finds the identity of a call, or the error that it ends with
"""
