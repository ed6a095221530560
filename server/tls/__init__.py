"""TLS of the three faces: gRPC, HTTP and metrics.

files.py         reads and checks the files of a certificate, its key and the clients' authorities
reload.py        takes renewed files while the server runs
context.py       the same files for Python's ssl module: HTTP and metrics
identities.py    the names in a client's certificate
exposure.py      refuses to listen on a public address without TLS
metrics.py       reloads, and when certificates expire
"""
