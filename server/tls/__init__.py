"""TLS of the three faces: gRPC, HTTP and metrics.

files.py         the paths of certificates, and what was read from them
certificates.py  checks what was read
watch.py         the current certificates of a process; reload.py: takes renewed files
context.py       certificates for Python's ssl module: HTTP and metrics
identities.py    the names in a client's certificate; forwarding.py: from the HTTP process to the gRPC server
exposure.py      refuses to listen on a public address without TLS
metrics.py       reloads, and when certificates expire
"""
