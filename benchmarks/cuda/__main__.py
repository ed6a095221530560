"""Command line: `python -m benchmarks.cuda --help`."""

# Worker processes import this file again; they must not load what only the command line needs.
if __name__ == "__main__":
    import sys

    from benchmarks.cuda.cli import main

    sys.exit(main())
