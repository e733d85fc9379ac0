"""`python -m tui` is `chatkv`."""

from tui.cli import main

main()
