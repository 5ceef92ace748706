"""`python -m phasewise` is the `phasewise` command."""

from phasewise.cli.main import main

if __name__ == "__main__":
    main()
