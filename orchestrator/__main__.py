"""`python -m orchestrator` is `freshet`."""

from orchestrator.cli.main import main

if __name__ == "__main__":
    main()
