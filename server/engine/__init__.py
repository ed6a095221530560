"""Arrays in, arrays out. Knows neither gRPC nor protobuf nor PyTorch.

The path of the data: validate -> submit -> schedule -> run -> split. `engine.Engine` serves many callers;
`in_process.InProcessModel` computes in the caller's own process.
"""
