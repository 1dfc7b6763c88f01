"""`python -m mars_ray.harness`: the command line of lm-evaluation-harness, which then knows our model.

In:    the arguments of `lm-eval`.
Out:   what `lm-eval` does with them.
Never: changes or adds an argument.
"""

import sys

from mars_ray.errors import MarsRayError
from mars_ray.harness import register


def main() -> None:
    """Run `lm-eval`; an error of ours is one line and an exit code."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except MarsRayError as error:
        print(f"mars-ray: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
