"""Who may do what: credentials become identities, and identities have rights. Knows neither gRPC nor models.

rights.py      what an identity may do, and the right that a method needs
identities.py  who calls: name, rights, limits and expiry
token_file.py  the tokens file: read, checked and written
keys.py        the public keys that sign JSON Web Tokens, of a file or a URL
web_tokens.py  verifies JSON Web Tokens, each once
guard.py       finds the identity of a call, or the error that it ends with
"""
