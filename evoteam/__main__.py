"""`python -m evoteam`."""

from evoteam.cli import main

main()
