"""Start the command."""

from .command import main

main()
