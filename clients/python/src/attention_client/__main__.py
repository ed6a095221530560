"""Runs the command line as `python -m attention_client`."""

from attention_client.cli import main

if __name__ == "__main__":
    main()
