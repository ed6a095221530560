"""Who may do what: credentials become identities, and identities have rights. Knows neither gRPC nor models.

rights.py      who calls, what an identity may do, and what a call ends with that is not permitted
token_file.py  the tokens file: read, checked and written
web_tokens.py  verifies JSON Web Tokens, each once, with the public keys of a file or a URL
guard.py       finds the identity of a call, or the error that it ends with
peers.py       names in client certificates, and what the HTTP process says of its clients
"""
