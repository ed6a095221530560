"""Lets the command line be run as `python -m attention_client`; changes with how it is started."""

import sys

from attention_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
