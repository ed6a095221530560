"""Arrays in, arrays out: repository, sessions, validation, scheduling.

Knows no gRPC, no protobuf and no PyTorch. One way for the data:
validate -> submit -> schedule -> run -> split.
"""
