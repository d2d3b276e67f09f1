"""`python -m orchestrator` is `freshet`."""

import sys

from orchestrator.cli.exit_codes import USER_ERROR
from orchestrator.client.shadowing import refusal, shadowing

if __name__ == "__main__":
    # Python imports from the current folder first, also what `main` imports.
    if (hidden := shadowing(sys.path)) is not None:
        print(f"freshet: {refusal(hidden, 'this command, which imports')}", file=sys.stderr)
        sys.exit(USER_ERROR)
    from orchestrator.cli.main import main

    main()
