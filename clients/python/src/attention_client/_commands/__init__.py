"""The commands of `attention-client`, in typer. Exit codes: 0 success, 1 the call failed, 2 wrong usage."""
