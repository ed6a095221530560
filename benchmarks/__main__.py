"""Command line: `python -m benchmarks --help`."""

# Worker processes import this file again; they must not load what only the command needs.
if __name__ == "__main__":
    from benchmarks.cli import app

    app()
