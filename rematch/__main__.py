"""`python -m rematch` is the `rematch` command."""

from rematch.cli import main

main()
