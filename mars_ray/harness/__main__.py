"""`python -m mars_ray.harness`: the command `lm-eval` of lm-evaluation-harness with our model registered."""

from mars_ray.harness import register
from mars_ray.program import run_program


def main() -> None:
    """Run `lm-eval`; an error of mars-ray is one line and an exit code."""
    run_program("mars-ray", _evaluate)


def _evaluate() -> None:
    register()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
